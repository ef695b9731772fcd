// The few entry points of the CUDA driver that the handlers call. The library is opened at run time: the module links
// no CUDA library and loads on machines without one.
#pragma once

#include <cstdint>

#include "../device/params.h"

namespace mok::ffi {

class CudaDriver {
 public:
  static const CudaDriver* get();  // null where there is no driver

  // A bf16 tensor with 128-byte-swizzled boxes, out of bounds = 0. Dimensions innermost first; strides in bytes, of all
  // but the innermost. Both return 0 or the driver's error code.
  int encode(TensorMap* map, const void* base, int rank, const uint64_t* dims, const uint64_t* strides,
             const uint32_t* box) const;
  int launch(void* kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream, void* params) const;

 private:
  using EncodeTiled = int (*)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                              const uint32_t*, int, int, int, int);
  using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                               void**, void**);
  EncodeTiled encode_tiled_ = nullptr;
  LaunchKernel launch_kernel_ = nullptr;
};

}  // namespace mok::ffi
