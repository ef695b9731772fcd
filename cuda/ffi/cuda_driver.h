// The few entry points of the CUDA driver that we call. The library is opened at run time: the module links no CUDA
// library and loads on machines without one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../device/params.h"

namespace mok::ffi {

class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& what, int code)
      : std::runtime_error("the CUDA driver refused to " + what + " (error " + std::to_string(code) + ")") {}
};

class CudaDriver {
 public:
  static const CudaDriver* get();  // null where there is no driver

  // A bf16 tensor with 128-byte-swizzled boxes, out of bounds = 0. Dimensions innermost first; strides in bytes, of all
  // but the innermost. These return 0 or the driver's error code.
  int encode(TensorMap* map, const void* base, int rank, const uint64_t* dims, const uint64_t* strides,
             const uint32_t* box) const;
  int zero(void* at, int64_t bytes, void* stream) const;
  int launch(void* kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream, void* params) const;

  // The rest throw CudaError. Devices are CUDA ordinals.
  int multiprocessors(int device) const;
  uint64_t granularity(int device) const;                       // of physical memory
  uint8_t* reserve_addresses(int64_t bytes) const;
  // `bytes` of zeroed memory of a device at an address, for the use of all `users`. Returns what unmap() needs.
  uint64_t map(int device, uint8_t* at, int64_t bytes, const std::vector<int>& users) const;
  void unmap(uint8_t* at, int64_t bytes, uint64_t memory) const;
  void free_addresses(uint8_t* at, int64_t bytes) const;
  void* allocate_host(int64_t bytes) const;                     // zeroed; every device may write it
  void free_host(void* memory) const;

 private:
  struct Api;
  explicit CudaDriver(const Api& api) : api_(api) {}
  const Api& api_;
};

}  // namespace mok::ffi
