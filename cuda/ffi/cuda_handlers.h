// What the Python module registers with XLA for GPUs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "../core/types.h"
#include "cpu_handlers.h"
#include "cuda_launch.h"

namespace mok::ffi {

// What Python does for calls on GPUs. All of it may throw std::exception.
struct CudaHost {
  // The seats of the EP groups that have this process and are named by a call's `span`; "": those of this process alone.
  struct Seating {
    std::string name;  // the same in all processes of these seats
    std::vector<int> devices;
    Sharing sharing;
  };
  // Compiles and loads kernels. This and the next two are called when XLA instantiates a call, never while it runs.
  std::function<CudaKernels(const char* main, int64_t hidden, int64_t inter, int64_t top_k, int64_t shared_inter, bool save,
                            bool weight_grad_f32)> load;
  std::function<Seating(const std::string& span, double patience_s)> seating;
  std::function<std::vector<MemoryHandle>(const std::string& seating, const std::string& piece, int64_t bytes,
                                          const std::vector<MemoryHandle>& mine, double patience_s)> share;
  // Called by a thread of its own.
  std::function<uint64_t(const std::string& seating, uint64_t round, uint64_t next)> agree;
};

// Before any call.
void set_cuda_host(CudaHost host);
// Seats of several processes are of a job; in another one they come together anew.
void forget_spanning_cuda_seats();
// Before the end of the process takes Python and the driver away.
void stop_watching_cuda_seats();

// Bytes of device memory of this process's GPUs that arenas take.
int64_t cuda_held_bytes();

std::vector<Handler> cuda_handlers();

}  // namespace mok::ffi
