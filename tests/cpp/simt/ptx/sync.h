// In place of cuda/device/ptx/sync.h: what kernels without tensor cores use of it. Loads that a loop may wait on give the
// other threads of the block a turn.
#pragma once

#include "../../core/types.h"

namespace mok::ptx {

inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const char*>(p) - &simt::anchor);
}
inline uint32_t load_shared_at(uint32_t address, uint32_t cta) {
  return __atomic_load_n(reinterpret_cast<uint32_t*>(simt::block->cluster->anchors[cta] + int32_t(address)), __ATOMIC_ACQUIRE);
}
inline void cluster_sync() { simt::wait(simt::Wait::cluster); }
inline int lane_id() { return simt::lane(); }
inline uint64_t nanoseconds() {
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

template <class T>
T load_acquire(const T* p) {
  simt::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline uint32_t load_acquire_gpu(const uint32_t* p) { return load_acquire(p); }
inline uint64_t load_acquire_sys(const uint64_t* p) { return load_acquire(p); }
inline uint32_t add_acquire_release_gpu(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline void add_release_gpu(uint32_t* p, uint32_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
inline void store_release_sys(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_system(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_system(int64_t* p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline int32_t load_system(const int32_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline uint4 load_system(const uint4* p) { return *p; }

}  // namespace mok::ptx
