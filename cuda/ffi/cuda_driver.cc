#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstring>

namespace mok::ffi {
namespace {

// The driver's own types and constants, as far as we use them.
struct Location { int type, id; };
struct AllocationProp {
  int type, handle_types;
  Location location;
  void* win32;
  unsigned char flags[8];
};
struct AccessDesc { Location location; int flags; };
constexpr int kPinned = 1, kOnDevice = 1, kReadWrite = 3, kNonBlocking = 1, kMultiprocessors = 16, kPortableMapped = 3;

AllocationProp on_device(int device) {
  AllocationProp prop;
  std::memset(&prop, 0, sizeof prop);
  prop.type = kPinned;
  prop.location = {kOnDevice, device};
  return prop;
}

}  // namespace

struct CudaDriver::Api {
  int (*cuTensorMapEncodeTiled)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                const uint32_t*, int, int, int, int);
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*cuInit)(unsigned);
  int (*cuDeviceGet)(int*, int);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuCtxPushCurrent_v2)(void*);
  int (*cuCtxPopCurrent_v2)(void**);
  int (*cuMemGetAllocationGranularity)(size_t*, const AllocationProp*, int);
  int (*cuMemAddressReserve)(uint64_t*, size_t, size_t, uint64_t, unsigned long long);
  int (*cuMemAddressFree)(uint64_t, size_t);
  int (*cuMemCreate)(uint64_t*, size_t, const AllocationProp*, unsigned long long);
  int (*cuMemRelease)(uint64_t);
  int (*cuMemMap)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
  int (*cuMemUnmap)(uint64_t, size_t);
  int (*cuMemSetAccess)(uint64_t, size_t, const AccessDesc*, size_t);
  int (*cuStreamCreate)(void**, unsigned);
  int (*cuStreamSynchronize)(void*);
  int (*cuStreamDestroy_v2)(void*);
  int (*cuMemsetD8Async)(uint64_t, unsigned char, size_t, void*);
  int (*cuMemHostAlloc)(void**, size_t, unsigned);
  int (*cuMemFreeHost)(void*);
};

const CudaDriver* CudaDriver::get() {
  static const CudaDriver* const driver = []() -> const CudaDriver* {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    auto* api = new Api;
    bool all = true;
    auto find = [&](auto& entry, const char* name) {
      void* const symbol = dlsym(library, name);
      all = all && symbol != nullptr;
      std::memcpy(&entry, &symbol, sizeof entry);
    };
#define MOK_FIND(name) find(api->name, #name)
    MOK_FIND(cuTensorMapEncodeTiled); MOK_FIND(cuLaunchKernel); MOK_FIND(cuInit); MOK_FIND(cuDeviceGet);
    MOK_FIND(cuDeviceGetAttribute); MOK_FIND(cuDevicePrimaryCtxRetain); MOK_FIND(cuCtxPushCurrent_v2);
    MOK_FIND(cuCtxPopCurrent_v2); MOK_FIND(cuMemGetAllocationGranularity); MOK_FIND(cuMemAddressReserve);
    MOK_FIND(cuMemAddressFree); MOK_FIND(cuMemCreate); MOK_FIND(cuMemRelease); MOK_FIND(cuMemMap);
    MOK_FIND(cuMemUnmap); MOK_FIND(cuMemSetAccess); MOK_FIND(cuStreamCreate); MOK_FIND(cuStreamSynchronize);
    MOK_FIND(cuStreamDestroy_v2); MOK_FIND(cuMemsetD8Async); MOK_FIND(cuMemHostAlloc); MOK_FIND(cuMemFreeHost);
#undef MOK_FIND
    return all && api->cuInit(0) == 0 ? new CudaDriver(*api) : nullptr;
  }();
  return driver;
}

namespace {

void check(int code, const std::string& what) {
  if (code != 0) throw CudaError(what, code);
}

}  // namespace

int CudaDriver::encode(TensorMap* map, const void* base, int rank, const uint64_t* dims, const uint64_t* strides,
                       const uint32_t* box) const {
  constexpr int kBf16 = 9, kNoInterleave = 0, kSwizzle128 = 3, kPromote128 = 2, kFillZeros = 0;
  const uint32_t ones[3] = {1, 1, 1};
  return api_.cuTensorMapEncodeTiled(map, kBf16, uint32_t(rank), const_cast<void*>(base), dims, strides, box, ones,
                                     kNoInterleave, kSwizzle128, kPromote128, kFillZeros);
}

int CudaDriver::zero(void* at, int64_t bytes, void* stream) const {
  return api_.cuMemsetD8Async(reinterpret_cast<uint64_t>(at), 0, size_t(bytes), stream);
}

int CudaDriver::launch(void* kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream,
                       void* params) const {
  void* arguments[] = {params};
  return api_.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, nullptr);
}

int CudaDriver::multiprocessors(int device) const {
  int handle = 0, n = 0;
  check(api_.cuDeviceGet(&handle, device), "open device " + std::to_string(device));
  check(api_.cuDeviceGetAttribute(&n, kMultiprocessors, handle), "count multiprocessors");
  return n;
}

uint64_t CudaDriver::granularity(int device) const {
  const AllocationProp prop = on_device(device);
  size_t bytes = 0;
  check(api_.cuMemGetAllocationGranularity(&bytes, &prop, 1), "tell the granularity of its memory");
  return bytes;
}

uint8_t* CudaDriver::reserve_addresses(int64_t bytes) const {
  uint64_t at = 0;
  check(api_.cuMemAddressReserve(&at, size_t(bytes), 0, 0, 0), "reserve an address range");
  return reinterpret_cast<uint8_t*>(at);
}

void CudaDriver::free_addresses(uint8_t* at, int64_t bytes) const {
  api_.cuMemAddressFree(reinterpret_cast<uint64_t>(at), size_t(bytes));
}

uint64_t CudaDriver::map(int device, uint8_t* at, int64_t bytes, const std::vector<int>& users) const {
  const AllocationProp prop = on_device(device);
  const auto address = reinterpret_cast<uint64_t>(at);
  const std::string what = std::to_string(bytes) + " bytes of memory of GPU " + std::to_string(device);
  uint64_t memory = 0;
  check(api_.cuMemCreate(&memory, size_t(bytes), &prop, 0),
        "give " + what + " to the arena; lower MoEConfig.capacity_factor or XLA_PYTHON_CLIENT_MEM_FRACTION");
  if (const int code = api_.cuMemMap(address, size_t(bytes), 0, memory, 0); code != 0) {
    api_.cuMemRelease(memory);
    throw CudaError("map " + what, code);
  }
  std::vector<AccessDesc> access;
  for (int user : users) access.push_back({{kOnDevice, user}, kReadWrite});
  int code = api_.cuMemSetAccess(address, size_t(bytes), access.data(), access.size());
  void *context = nullptr, *stream = nullptr;
  if (code == 0) code = api_.cuDevicePrimaryCtxRetain(&context, device);
  if (code == 0) code = api_.cuCtxPushCurrent_v2(context);
  if (code == 0) {
    // a stream of its own: the default stream would wait for calls that wait for their peers
    code = api_.cuStreamCreate(&stream, kNonBlocking);
    if (code == 0) code = api_.cuMemsetD8Async(address, 0, size_t(bytes), stream);
    if (code == 0) code = api_.cuStreamSynchronize(stream);
    if (stream != nullptr) api_.cuStreamDestroy_v2(stream);
    api_.cuCtxPopCurrent_v2(&context);
  }
  if (code != 0) {
    unmap(at, bytes, memory);
    throw CudaError("open " + what + " to the other GPUs of the process (do they have peer access?)", code);
  }
  return memory;
}

void CudaDriver::unmap(uint8_t* at, int64_t bytes, uint64_t memory) const {
  api_.cuMemUnmap(reinterpret_cast<uint64_t>(at), size_t(bytes));
  api_.cuMemRelease(memory);
}

void* CudaDriver::allocate_host(int64_t bytes) const {
  void *memory = nullptr, *context = nullptr;
  check(api_.cuDevicePrimaryCtxRetain(&context, 0), "open GPU 0");
  check(api_.cuCtxPushCurrent_v2(context), "open GPU 0");
  const int code = api_.cuMemHostAlloc(&memory, size_t(bytes), kPortableMapped);
  api_.cuCtxPopCurrent_v2(&context);
  check(code, "allocate pinned host memory");
  std::memset(memory, 0, size_t(bytes));
  return memory;
}

void CudaDriver::free_host(void* memory) const { api_.cuMemFreeHost(memory); }

}  // namespace mok::ffi
