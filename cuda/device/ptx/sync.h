// Barriers, flags, clocks: one thin wrapper per instruction.
#pragma once

#include "../../core/types.h"

namespace mok::ptx {

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ inline uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Volatile: asked for where it is used, it costs no register that must live through everything else.
__device__ inline int lane_id() {
  int r;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(r));
  return r;
}
__device__ inline uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// mbarriers in shared memory, by 32-bit address
__device__ inline void barrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
__device__ inline void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Without .release.cluster, which would put a GPU-wide fence into every stage: what this arrival orders are reads that
// wgmma.wait_group or the arriving thread has already completed.
__device__ inline void barrier_arrive_at(uint32_t bar, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(bar), "r"(cta)
      : "memory");
}
__device__ inline bool barrier_test(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ inline void barrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\n"
      "DONE:\n}\n" ::"r"(bar), "r"(parity)
      : "memory");
}
// Four words into a CTA's shared memory; completes 16 bytes on a barrier there.
__device__ inline void send_words(uint32_t address, const uint32_t* v, uint32_t bar, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %6;\nmapa.shared::cluster.u32 b, %5, %6;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {%1, %2, %3, %4}, [b];\n}\n" ::"r"(address),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(bar), "r"(cta)
      : "memory");
}
__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline void load_shared_v4(uint32_t address, uint32_t* v) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}
__device__ inline void store_shared_v2(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ inline uint32_t load_shared_at(uint32_t address, uint32_t cta) {
  uint32_t v;
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.u32 %0, [a];\n}\n"
               : "=r"(v)
               : "r"(address), "r"(cta)
               : "memory");
  return v;
}

__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ inline void barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Counters and flags in global memory
__device__ inline uint32_t load_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline uint32_t add_acquire_release_gpu(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
__device__ inline void add_release_gpu(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline void add_gpu(uint32_t* p, uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ inline uint64_t load_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// A peer's memory, or memory that a peer may be writing.
__device__ inline int32_t load_system(const int32_t* p) {
  int32_t v;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline uint4 load_system(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ inline void store_system(int64_t* p, int64_t v) {
  asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ inline void store_system(uint64_t* p, uint64_t v) { store_system(reinterpret_cast<int64_t*>(p), int64_t(v)); }

// Generic-proxy writes before, async-proxy (TMA) reads after; and the other way round for shared memory.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters>
__device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

}  // namespace mok::ptx
