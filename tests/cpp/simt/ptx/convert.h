// In place of cuda/device/ptx/convert.h.
#pragma once

#include "../../core/types.h"

namespace mok::ptx {

inline uint32_t to_bf16(float f) {
  uint32_t b;
  std::memcpy(&b, &f, 4);
  return (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float lo, float hi) { return to_bf16(lo) | to_bf16(hi) << 16; }

}  // namespace mok::ptx
