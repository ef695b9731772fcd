#include "cuda_driver.h"

#include <dlfcn.h>

namespace mok::ffi {

const CudaDriver* CudaDriver::get() {
  static const CudaDriver* const driver = []() -> const CudaDriver* {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    auto* d = new CudaDriver;
    d->encode_tiled_ = reinterpret_cast<EncodeTiled>(dlsym(library, "cuTensorMapEncodeTiled"));
    d->launch_kernel_ = reinterpret_cast<LaunchKernel>(dlsym(library, "cuLaunchKernel"));
    return d->encode_tiled_ != nullptr && d->launch_kernel_ != nullptr ? d : nullptr;
  }();
  return driver;
}

int CudaDriver::encode(TensorMap* map, const void* base, int rank, const uint64_t* dims, const uint64_t* strides,
                       const uint32_t* box) const {
  constexpr int kBf16 = 9, kNoInterleave = 0, kSwizzle128 = 3, kPromote128 = 2, kFillZeros = 0;
  const uint32_t ones[3] = {1, 1, 1};
  return encode_tiled_(map, kBf16, uint32_t(rank), const_cast<void*>(base), dims, strides, box, ones, kNoInterleave,
                       kSwizzle128, kPromote128, kFillZeros);
}

int CudaDriver::launch(void* kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream,
                       void* params) const {
  void* arguments[] = {params};
  return launch_kernel_(kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, nullptr);
}

}  // namespace mok::ffi
