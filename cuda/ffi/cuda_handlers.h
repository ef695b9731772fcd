// What the Python module registers with XLA for GPUs.
#pragma once

#include <functional>
#include <vector>

#include "../core/types.h"
#include "cpu_handlers.h"
#include "cuda_launch.h"

namespace mok::ffi {

// Compiles and loads kernels; called when XLA instantiates a call, never while it runs. Throws std::exception.
using CudaLoader = std::function<CudaKernels(const char* main, int64_t hidden, int64_t inter, int64_t top_k,
                                             int64_t shared_inter, bool save)>;

// The loader, and the CUDA ordinals of the process's devices. Before any call.
void set_cuda_loader(CudaLoader loader, std::function<std::vector<int>()> devices);

// Bytes of device memory that the arenas of all GPUs of the process take.
int64_t cuda_held_bytes();

std::vector<Handler> cuda_handlers();

}  // namespace mok::ffi
