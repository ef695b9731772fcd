// Conversions.
#pragma once

#include "../../core/types.h"

namespace mok::ptx {

// Two floats, rounded to nearest even, in one word.
__device__ inline uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

}  // namespace mok::ptx
