// The pipeline that Hopper's persistent kernels share: a dealer hands out tasks, a producer thread loads tiles by TMA,
// two math warpgroups multiply them and store results by TMA.
//
// Clusters of two CTAs work on one task at a time, each on its own 128 x 256 tile. A kernel describes its tasks by a
// Stream, and a task by a trivially copyable Stream::Task of kTaskWords words, which is all that producer and math know of it; the
// kind Stream::kStop ends the stream:
//
//   uint32_t count(), take()                       tasks, and the next number off the one in-order ticket
//   Task task(ticket)
//   bool ready(task)                               waits for what the task reads; false: the call has failed
//   void acquire(task)                             the same for another thread, once ready() was true for the dealer
//   int blocks(task)                               stages that the task takes: K blocks of 64, and what its store reads
//   void load(task, k, cta, stage, bar)            tells bar the bytes of block k and issues its loads: kBytesA of A,
//                                                  then kBytesB of B
//   void multiply(math, acc, task)                 MathWarp::multiply with the operands' layouts
//   void store(math, acc, task)                    MathWarp::store, and what to signal: math.pending
//   void signal(pending, lane)                     called by a whole warp when its stores of a task are complete
//
// Tasks wait only for earlier tasks, movers and flags of peers, so any number of resident clusters makes progress.
#pragma once

#include "../ptx/convert.h"
#include "../ptx/sync.h"
#include "../ptx/tma.h"
#include "wgmma.h"

namespace mok::sm90 {

using namespace mok::ptx;

constexpr int kBlockM = 128, kBlockN = 256, kBlockK = 64, kStages = 4, kMathWarps = 8, kClusterCtas = 2;
constexpr uint32_t kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2, kBytesStage = kBytesA + kBytesB;
constexpr uint32_t kBytesColumns = 64 * kBlockK * 2;            // 64 rows or columns of an operand, 64 of K
constexpr int kStoreRows = 16, kStoreColumns = 64, kStoreBuffers = 2;
constexpr uint32_t kBytesStore = kStoreRows * kStoreColumns * 2;
constexpr uint32_t kBarriers = kStages * kBytesStage + kMathWarps * kStoreBuffers * kBytesStore;
constexpr int kProducerRegisters = 72, kMathRegisters = 216;    // of the 168 that each thread starts with
constexpr int kTaskWords = 8;

// Dynamic shared memory of a CTA, by 32-bit address.
struct Shared {
  uint32_t base;
  __device__ uint32_t stage(uint32_t s) const { return base + s * kBytesStage; }
  __device__ uint32_t store_buffer(int warp, uint32_t i) const {
    return base + kStages * kBytesStage + (warp * kStoreBuffers + i) * kBytesStore;
  }
  __device__ uint32_t full(uint32_t s) const { return base + kBarriers + 8 * s; }
  __device__ uint32_t empty(uint32_t s) const { return full(kStages + s); }
  __device__ uint32_t task() const { return full(2 * kStages); }  // one task, and whether there is one
  __device__ uint32_t task_full() const { return task() + 4 * kTaskWords; }
  __device__ uint32_t task_empty() const { return task_full() + 8; }

  // By all threads of the cluster, once.
  __device__ void init() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        barrier_init(full(s), 1);
        barrier_init(empty(s), kMathWarps * kClusterCtas);
      }
      barrier_init(task_full(), 1);
      barrier_init(task_empty(), (kMathWarps + 1) * kClusterCtas);
      barriers_visible();
      fence_async_shared();
    }
    __syncthreads();
    cluster_sync();
  }
};

// Position in a ring of kSize slots with the parity of its current round.
template <int kSize>
struct Ring {
  uint32_t slot = 0, parity = 0;
  __device__ void advance() {
    if (++slot == kSize) { slot = 0; parity ^= 1; }
  }
};

// What a CTA is to do next. Whoever takes a task tells the dealer, who may then hand out the next one.
template <class Stream>
struct TaskSlot {
  using Task = typename Stream::Task;
  static_assert(sizeof(Task) == 4 * kTaskWords, "tasks are sent as so many words");
  const Shared& sh;
  uint32_t parity = 0;

  __device__ bool waiting() const { return barrier_test(sh.task_full(), parity); }
  // One thread of the CTA expects each task.
  __device__ void expect() const { barrier_expect(sh.task_full(), 4 * kTaskWords); }
  __device__ Task take() {
    barrier_wait(sh.task_full(), parity);
    parity ^= 1;
    Task task;
    uint32_t words[kTaskWords];
#pragma unroll
    for (int i = 0; i < kTaskWords; i += 4) load_shared_v4(sh.task() + 4 * i, words + i);
    memcpy(&task, words, sizeof task);
    return task;
  }
  __device__ void taken() const { barrier_arrive_at(sh.task_empty(), 0); }
};

// One thread of a cluster. A task goes to both CTAs once its inputs are there, so nobody is stuck in the middle of one;
// the next ticket is taken when both have begun, so nobody sits on work that others could do.
template <class Stream>
__device__ void deal(const Stream& stream, const Shared& sh) {
  const uint32_t tasks = stream.count();
  for (uint32_t parity = 1;; parity ^= 1) {
    barrier_wait(sh.task_empty(), parity);
    const uint32_t ticket = stream.take();
    typename Stream::Task task = {};
    if (ticket < tasks) task = stream.task(ticket);
    const bool go = ticket < tasks && stream.ready(task);
    if (!go) task.kind = Stream::kStop;
    uint32_t words[kTaskWords];
    memcpy(words, &task, sizeof task);
    for (uint32_t cta = 0; cta < kClusterCtas; ++cta)
#pragma unroll
      for (int i = 0; i < kTaskWords; i += 4) send_words(sh.task() + 4 * i, words + i, sh.task_full(), cta);
    if (!go) return;
  }
}

// One thread of each CTA.
template <class Stream>
__device__ void produce(const Stream& stream, const Shared& sh, uint32_t cta) {
  Ring<kStages> stage;
  TaskSlot<Stream> slot{sh};
  for (;;) {
    slot.expect();
    const auto task = slot.take();
    slot.taken();
    if (task.kind == Stream::kStop) return;
    stream.acquire(task);
    const int blocks = stream.blocks(task);
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      barrier_wait(sh.empty(stage.slot), stage.parity ^ 1);
      stream.load(task, k, cta, sh.stage(stage.slot), sh.full(stage.slot));
      stage.advance();
    }
  }
}

// A warp of the math warpgroups: rows 16 warp .. 16 warp + 15 of its CTA's tile.
template <class Stream>
struct MathWarp {
  const Stream& stream;
  const Shared& sh;
  uint32_t cta;
  int warp, lane;                // warp 0-7
  Ring<kStages> stage = {};
  uint32_t buffer = 0;
  int64_t pending = -1;          // what to signal once this warp's stores are complete; -1 = nothing

  __device__ void flush() {
    if (pending < 0) return;
    if (lane == 0) bulk_wait<0>();
    __syncwarp();
    stream.signal(pending, lane);
    pending = -1;
  }

  __device__ void release(uint32_t s) const {
    if (lane < kClusterCtas) barrier_arrive_at(sh.empty(s), lane);
  }

  // The next stage, of which the producer made something else than a K block; the caller releases it.
  __device__ uint32_t next_stage() {
    barrier_wait(sh.full(stage.slot), stage.parity);
    const uint32_t s = stage.slot;
    stage.advance();
    return s;
  }

  // The operands of one K block: acc (+)= a b.
  template <Major kA, Major kB>
  __device__ void multiply_block(float (&acc)[128], bool accumulate) const {
    const uint64_t a = descriptor(sh.stage(stage.slot) + (warp >> 2) * (kBytesA / 2), kA);
    const uint64_t b = descriptor(sh.stage(stage.slot) + kBytesA, kB);
    constexpr uint32_t kStepA = k_step(kA) >> 4, kStepB = k_step(kB) >> 4;
    wgmma_fence();
    wgmma_m64n256k16<kA, kB>(acc, a, b, accumulate);
    wgmma_m64n256k16<kA, kB>(acc, a + kStepA, b + kStepB, true);
    wgmma_m64n256k16<kA, kB>(acc, a + 2 * kStepA, b + 2 * kStepB, true);
    wgmma_m64n256k16<kA, kB>(acc, a + 3 * kStepA, b + 3 * kStepB, true);
    wgmma_commit();
  }

  // acc[64 rows of the warpgroup, 256] = sum over `blocks` K blocks; block(accumulate) is multiply_block.
  template <class Block>
  __device__ void multiply(int blocks, Block block) {
    uint32_t previous = 0;
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      barrier_wait(sh.full(stage.slot), stage.parity);
      block(k > 0);
      if (k > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      if (k == 2) flush();
      previous = stage.slot;
      stage.advance();
    }
    wgmma_wait<0>();
    release(previous);
    flush();
  }

  // Columns 8j .. 8j + 15 of 16 swizzled rows of 64 columns, two words for each 8 columns: rows lane / 4 and lane / 4 + 8.
  __device__ void write_columns(uint32_t rows, int j, const uint32_t (&v)[4]) const {
    const uint32_t at = rows + (lane & 15) * 128 + (((j + (lane >> 4)) ^ (lane & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
  }

  // Columns 8j .. 8j + 7 of 16 swizzled rows of 32 columns of f32, from their accumulators.
  __device__ void write_float_columns(uint32_t rows, int j, const float* v) const {
    const uint32_t r = lane >> 2, at = (rows + r * 128 + ((((lane >> 1) & 1) ^ r) << 4) + (lane & 1) * 8) ^ (j << 5);
    store_shared_v2(at, v[0], v[1]);
    store_shared_v2(at + 8 * 128, v[2], v[3]);
  }

  // 16 rows x 128 bytes of this warp: registers -> write(buffer) -> shared memory -> put(buffer), a TMA store.
  template <class Put, class Write>
  __device__ void store_rows(Put put, Write write) {
    if (lane == 0) bulk_wait_read<kStoreBuffers - 1>();
    __syncwarp();
    const uint32_t buf = sh.store_buffer(warp, buffer);
    write(buf);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      put(buf);
      bulk_commit();
    }
    buffer ^= 1;
  }

  // 64 columns of bf16: pack(j, v) gives the two words of columns 8j .. 8j + 7, as for write_columns.
  template <class Put, class Pack>
  __device__ void store(Put put, Pack pack) {
    store_rows(put, [&](uint32_t rows) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t v[4];
        pack(j, v);
        pack(j + 1, v + 2);
        write_columns(rows, j, v);
      }
    });
  }

  // 32 columns of f32.
  template <class Put>
  __device__ void store_floats(Put put, const float* acc) {
    store_rows(put, [&](uint32_t rows) {
#pragma unroll
      for (int j = 0; j < 4; ++j) write_float_columns(rows, j, acc + j * 4);
    });
  }

  template <class Pack>
  __device__ void store(const TensorMap* map, int32_t column, int32_t row, bool valid, Pack pack) {
    store([&](uint32_t from) { if (valid) tma_store_2d(map, from, column, row); }, pack);
  }
};

// Warps 4-11 of a CTA.
template <class Stream>
__device__ void compute(const Stream& stream, const Shared& sh, uint32_t cta, int warp, int lane) {
  MathWarp<Stream> me{stream, sh, cta, warp, lane};
  TaskSlot<Stream> slot{sh};
  for (;;) {
    // Somebody may wait for my stores before the next task can come: don't sleep on it with a signal in the pocket.
    if (!__any_sync(~0u, slot.waiting())) me.flush();
    const auto task = slot.take();
    __syncwarp();
    if (lane == 0) slot.taken();
    if (task.kind == Stream::kStop) break;
    float acc[128];
    stream.multiply(me, acc, task);
    stream.store(me, acc, task);
  }
  me.flush();
  if (lane == 0) bulk_wait<0>();
  __syncwarp();
}

}  // namespace mok::sm90
