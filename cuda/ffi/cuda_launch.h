// One rank's forward call on a GPU: work space, tensor maps, launches. Nothing is allocated, loaded or waited for.
#pragma once

#include "cuda_workspace.h"

namespace mok::ffi {

// Outputs last.
struct CudaForward : CudaInputs {
  void* y;
  void* saved[5];                // rows [rows, H], gate, up [rows, I], shared gate, up [T, I_s]; null: not wanted
  int32_t *tokens_per_expert, *rows_per_rank, *status;
  void* workspace;               // cuda_workspace_bytes()
};

int64_t cuda_workspace_bytes(const Shape& shape, bool save);
ArenaLayout cuda_arena_layout(const Shape& shape);

// `multiprocessors` may be fewer than the device has; at least 2. Returns 0 or the driver's error code.
int launch_forward(const CudaDriver& driver, const CudaKernels& kernels, const CudaSeats& seats, int32_t seat,
                   const CallOrder::Place& place, const CudaForward& call, void* stream, int multiprocessors);

}  // namespace mok::ffi
