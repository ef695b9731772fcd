#pragma once

#include "../core/types.h"

namespace mok {

struct alignas(64) TensorMap {  // bit-compatible with CUtensorMap
  uint64_t words[16];
};

}  // namespace mok
