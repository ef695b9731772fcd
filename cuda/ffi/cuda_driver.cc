#include "cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

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
constexpr int kFdHandle = 1, kFabricHandle = 8;
constexpr size_t kFabricBytes = 64;
constexpr int kOutOfMemory = 2;
constexpr int kPinned = 1, kOnDevice = 1, kReadWrite = 3, kNonBlocking = 1, kMultiprocessors = 16, kPortableMapped = 3;

int handle_type(Sharing sharing) {
  return sharing == Sharing::none ? 0 : sharing == Sharing::fabric ? kFabricHandle : kFdHandle;
}

AllocationProp on_device(int device, Sharing sharing = Sharing::none) {
  AllocationProp prop;
  std::memset(&prop, 0, sizeof prop);
  prop.type = kPinned;
  prop.handle_types = handle_type(sharing);
  prop.location = {kOnDevice, device};
  return prop;
}

}  // namespace

struct CudaDriver::Api {
  int (*cuTensorMapEncodeTiled)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                const uint32_t*, int, int, int, int);
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*cuInit)(unsigned);
  int (*cuDeviceGetCount)(int*);
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
  int (*cuMemExportToShareableHandle)(void*, uint64_t, int, unsigned long long);
  int (*cuMemImportFromShareableHandle)(uint64_t*, void*, int);
  int (*cuMemcpyDtoH_v2)(void*, uint64_t, size_t);
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
    MOK_FIND(cuDeviceGetCount);
    MOK_FIND(cuDeviceGetAttribute); MOK_FIND(cuDevicePrimaryCtxRetain); MOK_FIND(cuCtxPushCurrent_v2);
    MOK_FIND(cuCtxPopCurrent_v2); MOK_FIND(cuMemGetAllocationGranularity); MOK_FIND(cuMemAddressReserve);
    MOK_FIND(cuMemAddressFree); MOK_FIND(cuMemCreate); MOK_FIND(cuMemRelease); MOK_FIND(cuMemMap);
    MOK_FIND(cuMemUnmap); MOK_FIND(cuMemSetAccess); MOK_FIND(cuStreamCreate); MOK_FIND(cuStreamSynchronize);
    MOK_FIND(cuStreamDestroy_v2); MOK_FIND(cuMemsetD8Async); MOK_FIND(cuMemHostAlloc); MOK_FIND(cuMemFreeHost);
    MOK_FIND(cuMemExportToShareableHandle); MOK_FIND(cuMemImportFromShareableHandle); MOK_FIND(cuMemcpyDtoH_v2);
#undef MOK_FIND
    return all && api->cuInit(0) == 0 ? new CudaDriver(*api) : nullptr;
  }();
  return driver;
}

namespace {

void check(int code, const std::string& what) {
  if (code != 0) throw CudaError(what, code);
}

uint64_t address_of(const uint8_t* at) { return reinterpret_cast<uint64_t>(at); }

}  // namespace

// A device's primary context, current while this lives.
class CudaDriver::Context {
 public:
  Context(const Api& api, int device) : api_(api) {
    const std::string what = "open GPU " + std::to_string(device);
    void* context = nullptr;
    check(api.cuDevicePrimaryCtxRetain(&context, device), what);
    check(api.cuCtxPushCurrent_v2(context), what);
  }
  ~Context() {
    void* context = nullptr;
    api_.cuCtxPopCurrent_v2(&context);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  const Api& api_;
};

int CudaDriver::encode(TensorMap* map, const void* base, int rank, const uint64_t* dims, const uint64_t* strides,
                       const uint32_t* box, int elem_bytes) const {
  constexpr int kBf16 = 9, kF32 = 7, kNoInterleave = 0, kSwizzle128 = 3, kPromote128 = 2, kFillZeros = 0;
  const uint32_t ones[3] = {1, 1, 1};
  return api_.cuTensorMapEncodeTiled(map, elem_bytes == 4 ? kF32 : kBf16, uint32_t(rank), const_cast<void*>(base), dims,
                                     strides, box, ones, kNoInterleave, kSwizzle128, kPromote128, kFillZeros);
}

int CudaDriver::zero(void* at, int64_t bytes, void* stream) const {
  return api_.cuMemsetD8Async(address_of(static_cast<uint8_t*>(at)), 0, size_t(bytes), stream);
}

int CudaDriver::launch(void* kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream,
                       void* params) const {
  void* arguments[] = {params};
  return api_.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, nullptr);
}

int CudaDriver::devices() const {
  int n = 0;
  check(api_.cuDeviceGetCount(&n), "count GPUs");
  return n;
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
  api_.cuMemAddressFree(address_of(at), size_t(bytes));
}

uint64_t CudaDriver::create(int device, int64_t bytes, Sharing sharing) const {
  const AllocationProp prop = on_device(device, sharing);
  uint64_t memory = 0;
  const int code = api_.cuMemCreate(&memory, size_t(bytes), &prop, 0);
  check(code, "make " + std::to_string(bytes) + " bytes of memory of GPU " + std::to_string(device) +
                  (sharing == Sharing::none ? "" : " for several processes") +
                  (code == kOutOfMemory ? "; lower MoEConfig.capacity_factor or XLA_PYTHON_CLIENT_MEM_FRACTION" : ""));
  return memory;
}

MemoryHandle CudaDriver::export_memory(uint64_t memory, Sharing sharing) const {
  MemoryHandle handle;
  handle.fabric.resize(sharing == Sharing::fabric ? kFabricBytes : 0);
  void* const to = sharing == Sharing::fabric ? static_cast<void*>(handle.fabric.data()) : &handle.fd;
  check(api_.cuMemExportToShareableHandle(to, memory, handle_type(sharing), 0), "export memory to other processes");
  return handle;
}

uint64_t CudaDriver::import_memory(const MemoryHandle& handle) const {
  const bool fabric = handle.fd < 0;
  void* const from = fabric ? const_cast<char*>(handle.fabric.data()) : reinterpret_cast<void*>(intptr_t{handle.fd});
  uint64_t memory = 0;
  check(api_.cuMemImportFromShareableHandle(&memory, from, fabric ? kFabricHandle : kFdHandle),
        "import memory of another process");
  return memory;
}

void CudaDriver::release(uint64_t memory) const { api_.cuMemRelease(memory); }

void CudaDriver::map(uint8_t* at, int64_t bytes, uint64_t memory, const std::vector<int>& users) const {
  const std::string what = std::to_string(bytes) + " bytes of an arena";
  check(api_.cuMemMap(address_of(at), size_t(bytes), 0, memory, 0), "map " + what);
  std::vector<AccessDesc> access;
  for (int user : users) access.push_back({{kOnDevice, user}, kReadWrite});
  const int code = api_.cuMemSetAccess(address_of(at), size_t(bytes), access.data(), access.size());
  if (code == 0) return;
  api_.cuMemUnmap(address_of(at), size_t(bytes));
  throw CudaError("open " + what + " to all GPUs that share it (do they have peer access?)", code);
}

void CudaDriver::unmap(uint8_t* at, int64_t bytes, uint64_t memory) const {
  api_.cuMemUnmap(address_of(at), size_t(bytes));
  release(memory);
}

void CudaDriver::zero_now(int device, uint8_t* at, int64_t bytes) const {
  const Context context(api_, device);
  // a stream of its own: the default stream would wait for calls that wait for their peers
  void* stream = nullptr;
  int code = api_.cuStreamCreate(&stream, kNonBlocking);
  if (code == 0) code = api_.cuMemsetD8Async(address_of(at), 0, size_t(bytes), stream);
  if (code == 0) code = api_.cuStreamSynchronize(stream);
  if (stream != nullptr) api_.cuStreamDestroy_v2(stream);
  check(code, "clear an arena");
}

void CudaDriver::try_sharing(int device, Sharing sharing) const {
  const Context context(api_, device);
  const auto bytes = int64_t(granularity(device));
  uint8_t* const at = reserve_addresses(2 * bytes);
  std::vector<uint64_t> made;
  MemoryHandle handle;
  std::string failure;
  try {
    made.push_back(create(device, bytes, sharing));
    map(at, bytes, made[0], {device});
    zero_now(device, at, bytes);
    handle = export_memory(made[0], sharing);
    made.push_back(import_memory(handle));
    map(at + bytes, bytes, made[1], {device});
    uint64_t word = 1;
    check(api_.cuMemcpyDtoH_v2(&word, address_of(at + bytes), sizeof word), "read imported memory");
    if (word != 0) failure = "imported memory is not what was exported";
  } catch (const CudaError& e) {
    failure = e.what();
  }
  if (handle.fd >= 0) close(handle.fd);
  for (size_t i = 0; i < made.size(); ++i) unmap(at + int64_t(i) * bytes, bytes, made[i]);  // not mapped: no harm
  free_addresses(at, 2 * bytes);
  if (!failure.empty()) throw std::runtime_error(failure);
}

void* CudaDriver::allocate_host(int device, int64_t bytes) const {
  const Context context(api_, device);
  void* memory = nullptr;
  check(api_.cuMemHostAlloc(&memory, size_t(bytes), kPortableMapped), "allocate pinned host memory");
  std::memset(memory, 0, size_t(bytes));
  return memory;
}

void CudaDriver::free_host(void* memory) const { api_.cuMemFreeHost(memory); }

}  // namespace mok::ffi
