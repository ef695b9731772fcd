// What the Python module registers with XLA for GPUs.
#pragma once

#include <functional>
#include <vector>

#include "../core/types.h"
#include "cpu_handlers.h"

namespace mok::ffi {

// Kernels of one shape, loaded on every device of the process, and a word in host memory for how calls end.
struct CudaKernels {
  void* route;
  void* forward;
  void* host_status;
};

// Compiles and loads; called when XLA instantiates a call, never while it runs. Throws std::exception.
using CudaLoader = std::function<CudaKernels(int64_t hidden, int64_t inter, int64_t top_k, int64_t experts)>;
void set_cuda_loader(CudaLoader loader);

// Device memory that a forward call works in: a result of the call that nobody reads.
int64_t cuda_workspace_bytes(const Shape& shape);

std::vector<Handler> cuda_handlers();

}  // namespace mok::ffi
