// The two calls of the layer on one rank.
#pragma once

#include "rank_call.h"

namespace mok::cpu {

// Residuals; null pointers when nothing is saved. Rows are routed-buffer rows, tokens for the shared expert.
struct SavedBuffers {
  void *rows, *gate, *up, *shared_gate, *shared_up;
};

struct ForwardResults {
  void* y;                     // [T, H]
  int32_t* tokens_per_expert;  // [E]
  int32_t* rows_per_rank;      // [P]
  int32_t* status;             // [1]
  SavedBuffers saved;
};

struct WeightGrads {
  void *gate, *up, *down;
};

struct BackwardResults {
  void* dx;                   // [T, H]
  float* d_router_weights;    // [T, K]
  WeightGrads experts, shared;
  int32_t weight_grad_bytes;  // of their elements: 2 = bfloat16, 4 = float32
};

Status run_forward(Group& group, uint64_t generation, const CallArgs& args, const ForwardResults& out, int workers);
Status run_backward(Group& group, uint64_t generation, const CallArgs& args, const SavedBuffers& saved, const void* dy,
                    const BackwardResults& out, int workers);

}  // namespace mok::cpu
