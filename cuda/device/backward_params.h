// Parameters of the backward kernel. Plain data, the same for host and device.
#pragma once

#include "params.h"

namespace mok {

// The arrays of the routed experts, or of the shared one, as TMA sees them: [1, rows, H or I] rows, [E, H, I] and
// [E, I, H] weights.
struct BackwardMaps {
  TensorMap x, dy, g, u, d_g, d_u, hw, w_gate, w_up, w_down;                                        // boxes of 64 x 64
  TensorMap to_g, to_u, to_d_g, to_d_u, to_hw, to_dx;                                               // boxes of 16 x 64
  TensorMap to_gate_grad, to_up_grad, to_down_grad;                                                 // the same, or 16 x 32 f32
};

struct Span {
  void* at;
  int64_t bytes;  // a multiple of 4
};

struct BackwardParams : MoverParams {
  static constexpr int32_t kWeightGrads = 6;
  BackwardMaps routed, shared;
  float* row_weight;                // [rows], 0 = padding
  float* dots;                      // [tiles of I, rows] <dhu, silu(g) u> over the columns of a tile
  float* row_dw;                    // [rows] their sums, in the arena, if there is one
  float* dw;                        // [T, K]
  Span weight_grads[kWeightGrads];  // what a failed call fills with NaN, with dx and dw
};

}  // namespace mok
