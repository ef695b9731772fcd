// CUDA's threads on a CPU, enough for the kernels' control code: a block is a thread of the operating system, its CUDA
// threads are fibers of it. So blocks run at the same time, and within a block every barrier, vote and shuffle waits for
// exactly the lanes that CUDA says it waits for. A block whose threads all wait for each other is reported.
//
// Included before every other header (-include), with tests/cpp/simt/ptx in place of cuda/device/ptx.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __noinline__ __attribute__((noinline))
#define __shared__ thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace simt {

// All blocks of a cluster, at a barrier of the cluster.
class Cluster {
 public:
  explicit Cluster(int blocks) : anchors(size_t(blocks)), blocks_(blocks) {}
  void sync() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++arrived_ == blocks_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round != round_; });
  }
  std::vector<char*> anchors;  // of each block's thread-local memory

 private:
  const int blocks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0, round_ = 0;
};

inline thread_local char anchor;  // thread-local variables stand at the same distance from it in every thread

enum class Wait { none, block, cluster, lanes, done };

// A fiber starts by setcontext and then jumps: swapcontext would ask the kernel for the signal mask each time.
struct Fiber {
  ucontext_t context;
  jmp_buf at;
  bool started = false;
  std::unique_ptr<char[]> stack;
  int index = 0;
  Wait wait = Wait::none;
  uint32_t mask = 0;        // lanes that it waits for
  uint64_t value = 0;       // what it brings to them
  uint64_t seen[32] = {};   // what they brought
};

struct Block {
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  Fiber* running = nullptr;
  Cluster* cluster = nullptr;
  int index = 0;
  std::function<void()> kernel;
};
inline thread_local Block* block = nullptr;

inline Fiber& me() { return *block->running; }
inline void yield() {
  if (_setjmp(me().at) == 0) _longjmp(block->scheduler, 1);
}
inline void wait(Wait what) {
  me().wait = what;
  yield();
}

inline void run_fiber() {
  block->kernel();
  me().wait = Wait::done;
  yield();
}

inline void resume(Fiber& f) {
  block->running = &f;
  if (_setjmp(block->scheduler) != 0) return;
  if (f.started) _longjmp(f.at, 1);
  f.started = true;
  setcontext(&f.context);
}

// Everybody of a warp whose lanes all wait for the same lanes goes on.
inline bool release_lanes(Block& b) {
  bool any = false;
  for (size_t first = 0; first < b.fibers.size(); first += 32)
    for (int lane = 0; lane < 32; ++lane) {
      Fiber& f = b.fibers[first + size_t(lane)];
      if (f.wait != Wait::lanes) continue;
      bool all = true;
      for (int i = 0; i < 32; ++i) {
        const Fiber& other = b.fibers[first + size_t(i)];
        if (f.mask >> i & 1) all = all && (other.wait == Wait::lanes && other.mask == f.mask);
      }
      if (!all) continue;
      const uint32_t mask = f.mask;
      for (int i = 0; i < 32; ++i) {
        if (!(mask >> i & 1)) continue;
        Fiber& to = b.fibers[first + size_t(i)];
        for (int j = 0; j < 32; ++j) to.seen[j] = mask >> j & 1 ? b.fibers[first + size_t(j)].value : 0;
        to.wait = Wait::none;
      }
      any = true;
    }
  return any;
}

inline bool release_block(Block& b) {
  for (Wait what : {Wait::block, Wait::cluster}) {
    size_t waiting = 0, done = 0;
    for (const Fiber& f : b.fibers) {
      waiting += f.wait == what;
      done += f.wait == Wait::done;
    }
    if (waiting == 0 || waiting + done != b.fibers.size()) continue;
    if (what == Wait::cluster) b.cluster->sync();
    bool all = true;  // for __syncthreads_and
    for (const Fiber& f : b.fibers)
      if (f.wait == what) all = all && f.value != 0;
    for (Fiber& f : b.fibers)
      if (f.wait == what) {
        f.wait = Wait::none;
        f.seen[0] = all;
      }
    return true;
  }
  return false;
}

[[noreturn]] inline void report_deadlock(const Block& b) {
  std::fprintf(stderr, "block %d: its threads wait for each other:", b.index);
  for (const Fiber& f : b.fibers)
    if (f.wait == Wait::lanes) std::fprintf(stderr, " %d (lanes %08x)", f.index, f.mask);
    else if (f.wait == Wait::block) std::fprintf(stderr, " %d (block)", f.index);
  std::fprintf(stderr, "\n");
  std::fflush(stderr);
  std::_Exit(1);
}

inline void run_block(Block& b, int threads) {
  constexpr size_t kStack = 48 << 10;
  block = &b;
  b.fibers.resize(size_t(threads));
  for (int i = 0; i < threads; ++i) {
    Fiber& f = b.fibers[size_t(i)];
    f.index = i;
    f.stack.reset(new char[kStack]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    makecontext(&f.context, run_fiber, 0);
  }
  for (bool left = true; left;) {
    bool ran = false;
    left = false;
    for (Fiber& f : b.fibers) {
      if (f.wait != Wait::none) continue;
      resume(f);
      ran = true;
    }
    for (const Fiber& f : b.fibers) left = left || f.wait != Wait::done;
    const bool released = release_lanes(b) | release_block(b);
    if (left && !ran && !released) report_deadlock(b);
  }
  block = nullptr;
}

// A kernel's whole grid; returns when it has ended. `cluster` blocks make a cluster.
template <class Kernel>
void launch(int blocks, int cluster, int threads, Kernel kernel) {
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::thread> running;
  for (int c = 0; c < blocks / cluster; ++c) clusters.push_back(std::make_unique<Cluster>(cluster));
  for (int i = 0; i < blocks; ++i)
    running.emplace_back([&, i] {
      Block b;
      b.index = i;
      b.cluster = clusters[size_t(i / cluster)].get();
      b.cluster->anchors[size_t(i % cluster)] = &anchor;
      b.cluster->sync();
      b.kernel = kernel;
      run_block(b, threads);
      b.cluster->sync();  // the others may still look into this one's memory
    });
  for (auto& t : running) t.join();
}

// What lanes bring to each other: everybody in the mask sees what everybody in it brought.
inline const uint64_t* exchange(uint32_t mask, uint64_t value) {
  me().mask = mask;
  me().value = value;
  wait(Wait::lanes);
  return me().seen;
}
template <class T>
uint64_t to_word(T v) {
  uint64_t w = 0;
  std::memcpy(&w, &v, sizeof v);
  return w;
}
template <class T>
T from_word(uint64_t w) {
  T v;
  std::memcpy(&v, &w, sizeof v);
  return v;
}

struct Index {
  int x;
};
inline Index thread_index() { return {me().index}; }
inline Index block_index() { return {block->index}; }
inline int lane() { return me().index & 31; }

}  // namespace simt

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())

inline void __syncthreads() {
  simt::me().value = 1;
  simt::wait(simt::Wait::block);
}
inline int __syncthreads_and(int value) {
  simt::me().value = value != 0;
  simt::wait(simt::Wait::block);
  return int(simt::me().seen[0]);
}
inline void __syncwarp(uint32_t mask = ~0u) { simt::exchange(mask, 0); }
template <class T>
T __shfl_sync(uint32_t mask, T v, int from) {
  return simt::from_word<T>(simt::exchange(mask, simt::to_word(v))[from & 31]);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T v, int by) {
  const int from = simt::lane() - by;
  const uint64_t* all = simt::exchange(mask, simt::to_word(v));
  return from < 0 ? v : simt::from_word<T>(all[from]);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T v, int with) {
  const int from = simt::lane() ^ with;
  return simt::from_word<T>(simt::exchange(mask, simt::to_word(v))[from]);
}
inline uint32_t __ballot_sync(uint32_t mask, int value) {
  const uint64_t* all = simt::exchange(mask, value != 0);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= uint32_t(all[i] != 0) << i;
  return bits;
}
inline int __all_sync(uint32_t mask, int value) { return __ballot_sync(mask, value) == mask; }
inline int __any_sync(uint32_t mask, int value) { return __ballot_sync(mask, value) != 0; }
inline uint32_t __match_any_sync(uint32_t mask, int32_t value) {
  const uint64_t mine = simt::to_word(value), *all = simt::exchange(mask, mine);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= uint32_t((mask >> i & 1) && all[i] == mine) << i;
  return bits;
}
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) {
  simt::yield();
  std::this_thread::yield();
}
template <class T>
T __ldg(const T* p) { return *p; }
inline float __uint_as_float(uint32_t v) { return simt::from_word<float>(v); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline uint32_t atomicExch(uint32_t* p, uint32_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
inline int atomicMin(int* p, int v) {
  int old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return old;
}
