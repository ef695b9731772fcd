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

// How memory of a GPU is shared with other processes.
enum class Sharing { none, file_descriptor, fabric };

// What another process needs to map a piece of memory: a file descriptor, which is its holder's to close, or a fabric
// handle.
struct MemoryHandle {
  int fd = -1;
  std::string fabric;
};

class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& what, int code)
      : std::runtime_error("the CUDA driver refused to " + what + " (error " + std::to_string(code) + ")") {}
};

class CudaDriver {
 public:
  static const CudaDriver* get();  // null where there is no driver

  // A tensor of bf16 (2 bytes an element) or f32 (4) with 128-byte-swizzled boxes, out of bounds = 0. Dimensions innermost
  // first; strides in bytes, of all but the innermost. These return 0 or the driver's error code.
  int encode(TensorMap* map, const void* base, int rank, const uint64_t* dims, const uint64_t* strides,
             const uint32_t* box, int elem_bytes) const;
  int zero(void* at, int64_t bytes, void* stream) const;
  int launch(void* kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream, void* params) const;

  // The rest throw CudaError. Devices are CUDA ordinals.
  int devices() const;
  int multiprocessors(int device) const;
  uint64_t granularity(int device) const;                       // of physical memory
  uint8_t* reserve_addresses(int64_t bytes) const;
  // Physical memory of a device. Returns what the others take for it.
  uint64_t create(int device, int64_t bytes, Sharing sharing) const;
  MemoryHandle export_memory(uint64_t memory, Sharing sharing) const;
  uint64_t import_memory(const MemoryHandle& handle) const;
  void release(uint64_t memory) const;
  // Maps memory at an address, for the use of all `users`; until unmap(), which releases it, too.
  void map(uint8_t* at, int64_t bytes, uint64_t memory, const std::vector<int>& users) const;
  void unmap(uint8_t* at, int64_t bytes, uint64_t memory) const;
  void zero_now(int device, uint8_t* at, int64_t bytes) const;
  // Creates, exports, imports and reads a piece of memory. Throws what was refused.
  void try_sharing(int device, Sharing sharing) const;
  void free_addresses(uint8_t* at, int64_t bytes) const;
  void* allocate_host(int device, int64_t bytes) const;         // zeroed; every device may write it
  void free_host(void* memory) const;

 private:
  struct Api;
  class Context;
  explicit CudaDriver(const Api& api) : api_(api) {}
  const Api& api_;
};

}  // namespace mok::ffi
