// One rank's backward call on a GPU: work space, tensor maps, launches. Nothing is allocated, loaded or waited for.
#pragma once

#include "cuda_launch.h"

namespace mok::ffi {

// Outputs last. The kernel recomputes what is not saved.
struct CudaBackward : CudaInputs {
  void* saved[5];                 // rows [rows, H], gate, up [rows, I], shared gate, up [T, I_s]; null: recompute
  const void* dy;
  void *dx, *dw;
  void *d_gate, *d_up, *d_down, *d_shared_gate, *d_shared_up, *d_shared_down;
  int32_t weight_grad_bytes;      // of their elements, as the kernel was compiled: 2 = bf16, 4 = f32
  void* workspace;                // cuda_backward_bytes()
};

int64_t cuda_backward_bytes(const Shape& shape, bool recompute);

// `multiprocessors` may be fewer than the device has; at least 2. Returns 0 or the driver's error code.
int launch_backward(const CudaDriver& driver, const CudaKernels& kernels, const CudaSeats& seats, int32_t seat,
                    const CallOrder::Place& place, const CudaBackward& call, void* stream, int multiprocessors);

}  // namespace mok::ffi
