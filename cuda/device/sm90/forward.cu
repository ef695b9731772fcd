// Forward megakernel for Hopper: one rank's dispatch, expert MLPs and combine.
//
//   movers (3 warps a CTA)   x -> routed rows, as the stream will need them ............ | token sums -> y
//   producer (1 warp)             tasks in order -> [rows | W_g W_u] tiles, [h | W_d] tiles by TMA
//   math (2 warpgroups)                      h = silu(x W_g) * (x W_u), y rows = h W_d
//
// Persistent clusters of two CTAs along M: both work on one task, CTA r on its 128 rows; each loads half of the
// weights for both. Tasks come off one in-order ticket and wait for earlier tasks and movers only, so any number of
// resident clusters makes progress. A wait that expires fails the call: its result is NaN and the host hears of it.
#include "../params.h"
#include "../ptx/sync.h"
#include "../ptx/tma.h"
#include "wgmma.h"

// Compile-time shape: MOK_HIDDEN, MOK_INTER, MOK_TOP_K.
namespace mok::sm90 {

using namespace mok::ptx;

constexpr int kBlockK = 64, kBlockM = 128, kStages = 4, kRing = 2, kMathWarps = 8, kClusterCtas = 2;
constexpr uint32_t kBytesA = kBlockM * kBlockK * 2, kBytesB = 256 * kBlockK * 2, kBytesStage = kBytesA + kBytesB;
constexpr uint32_t kBytesColumns = 64 * kBlockK * 2;            // 64 columns of a weight tile
constexpr int kStoreRows = 16, kStoreColumns = 64, kStoreBuffers = 2;
constexpr uint32_t kBytesStore = kStoreRows * kStoreColumns * 2;
constexpr uint32_t kBarriers = kStages * kBytesStage + kMathWarps * kStoreBuffers * kBytesStore;

constexpr int kHidden = MOK_HIDDEN, kInter = MOK_INTER, kTopK = MOK_TOP_K;
constexpr int kGateUpBlocks = (kHidden + kBlockK - 1) / kBlockK, kDownBlocks = (kInter + kBlockK - 1) / kBlockK;
constexpr int kGateUpTiles = (kInter + 127) / 128, kDownTiles = (kHidden + 255) / 256;
constexpr uint32_t kGateUpSignals = kGateUpTiles * kMathWarps * kClusterCtas;
constexpr uint32_t kDownSignals = kDownTiles * kMathWarps * kClusterCtas;
constexpr int kPullRows = 8;  // rows that a mover warp takes at a time
constexpr uint32_t kStop = 0xffffffffu;

static_assert(kHidden % 8 == 0 && kInter % 8 == 0, "rows of bf16 must be multiples of 16 bytes for TMA");

// ---- waits with a deadline ----

__device__ inline bool call_failed(const ForwardParams& p) {
  return load_acquire_gpu(p.routes.counters + Counter::failed) != 0;
}

__device__ inline bool wait_counter(const ForwardParams& p, int64_t counter, uint32_t target) {
  const uint32_t* word = p.routes.counters + counter;
  if (load_acquire_gpu(word) >= target) return true;
  const uint64_t start = nanoseconds();
  for (;;) {
    for (int i = 0; i < 256; ++i) {
      if (load_acquire_gpu(word) >= target) return true;
      __nanosleep(20);
    }
    if (call_failed(p)) return false;
    if (nanoseconds() - start > p.deadline_ns) {
      if (atomicExch(p.routes.counters + Counter::failed, 1u) == 0)
        store_release_sys(&p.host_status->code, uint64_t(Code::peer_timeout));
      return false;
    }
  }
}

// ---- shared memory of a CTA ----

struct Shared {
  uint32_t base;
  __device__ uint32_t stage(uint32_t s) const { return base + s * kBytesStage; }
  __device__ uint32_t store_buffer(int warp, uint32_t i) const {
    return base + kStages * kBytesStage + (warp * kStoreBuffers + i) * kBytesStore;
  }
  __device__ uint32_t full(uint32_t s) const { return base + kBarriers + 8 * s; }
  __device__ uint32_t empty(uint32_t s) const { return full(kStages + s); }
  __device__ uint32_t task_full(uint32_t i) const { return full(2 * kStages + i); }
  __device__ uint32_t task_empty(uint32_t i) const { return full(2 * kStages + kRing + i); }
  __device__ uint32_t task(uint32_t i) const { return full(2 * kStages + 2 * kRing) + 4 * i; }
};

// Position in a ring of kSize slots with the parity of its current round.
template <int kSize>
struct Ring {
  uint32_t slot = 0, parity = 0;
  __device__ void advance() {
    if (++slot == kSize) { slot = 0; parity ^= 1; }
  }
};

// ---- producer: one thread a CTA ----

__device__ inline bool inputs_ready(const ForwardParams& p, const PairTask& t) {
  const bool ready = t.kind == 0
      ? wait_counter(p, Counter::pulled(t.pair), uint32_t(p.routes.pair_rows[t.pair]))
      : wait_counter(p, Counter::hidden(t.pair, p.max_pairs), kGateUpSignals);
  fence_async_global();  // what the counter released was written by ordinary stores; TMA reads it next
  return ready;
}

__device__ inline void load_stage(const ForwardParams& p, const PairTask& t, int32_t row, int k, uint32_t cta,
                                  uint32_t stage, uint32_t bar) {
  const int32_t column = k * kBlockK;
  tma_load_2d(stage, t.kind == 0 ? &p.rows : &p.hidden, bar, column, row);
  const uint32_t weights = stage + kBytesA;
  // Four blocks of 64 columns; this CTA loads two of them for both. gate_up: gate, up, gate, up.
  for (uint32_t i = 0; i < 2; ++i) {
    if (t.kind == 0) {
      tma_load_3d_multicast(weights + (2 * i + cta) * kBytesColumns, cta == 0 ? &p.gate : &p.up, bar,
                            t.tile * 128 + int32_t(i) * 64, column, t.expert, 3);
    } else {
      const uint32_t block = 2 * cta + i;
      tma_load_3d_multicast(weights + block * kBytesColumns, &p.down, bar, t.tile * 256 + int32_t(block) * 64, column,
                            t.expert, 3);
    }
  }
}

__device__ inline void produce(const ForwardParams& p, const Shared& sh, uint32_t cta) {
  Ring<kStages> stage;
  Ring<kRing> ring, publish;
  const uint32_t tasks = uint32_t(p.routes.totals[0]);
  // CTA 0 deals: a task goes to both CTAs once its inputs are there, so nobody is stuck in the middle of one.
  auto deal = [&](uint32_t ticket) {
    uint32_t word = kStop;
    if (ticket < tasks && inputs_ready(p, p.routes.tasks[ticket]) && !call_failed(p)) word = ticket;
    barrier_wait(sh.task_empty(publish.slot), publish.parity ^ 1);
    for (uint32_t r = 0; r < kClusterCtas; ++r) send_word(sh.task(publish.slot), word, sh.task_full(publish.slot), r);
    publish.advance();
  };
  if (cta == 0) deal(atomicAdd(p.routes.counters + Counter::ticket, 1u));
  for (;;) {
    barrier_expect(sh.task_full(ring.slot), 4);
    barrier_wait(sh.task_full(ring.slot), ring.parity);
    const uint32_t ticket = load_shared(sh.task(ring.slot));
    barrier_arrive_at(sh.task_empty(ring.slot), 0);
    ring.advance();
    if (ticket == kStop) return;
    uint32_t next = 0;
    if (cta == 0) next = atomicAdd(p.routes.counters + Counter::ticket, 1u);
    const PairTask t = p.routes.tasks[ticket];
    if (cta != 0) inputs_ready(p, t);  // they are: this acquires them for this CTA
    const int32_t row = p.routes.pair_row[t.pair] + int32_t(cta) * kBlockM;
    const int blocks = t.kind == 0 ? kGateUpBlocks : kDownBlocks;
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      barrier_wait(sh.empty(stage.slot), stage.parity ^ 1);
      barrier_expect(sh.full(stage.slot), kBytesStage);
      load_stage(p, t, row, k, cta, sh.stage(stage.slot), sh.full(stage.slot));
      stage.advance();
    }
    if (cta == 0) deal(next);
  }
}

// ---- math: two warpgroups a CTA, 64 rows each ----

__device__ inline uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// silu(g) u for four elements with one reciprocal: the special function unit is what limits this epilogue. The
// exponent is clamped so that the product of the four denominators stays finite; a sigmoid under 2^-30 reads 2^-30.
__device__ inline void swiglu4(const float* g, const float* u, uint32_t* out) {
  float a[4], r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a[i]) : "f"(fminf(g[i] * -1.4426950408889634f, 30.0f)));
    a[i] += 1.0f;
  }
  const float a01 = a[0] * a[1], a23 = a[2] * a[3];
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a01 * a23));
  const float r01 = r * a23, r23 = r * a01;
  out[0] = pack_bf16(g[0] * u[0] * (r01 * a[1]), g[1] * u[1] * (r01 * a[0]));
  out[1] = pack_bf16(g[2] * u[2] * (r23 * a[3]), g[3] * u[3] * (r23 * a[2]));
}

struct MathWarp {
  const ForwardParams& p;
  const Shared& sh;
  uint32_t cta;
  int warp, lane;                // warp 0-7
  uint32_t buffer = 0;
  int64_t pending = -1;          // counter to raise once this warp's stores are complete

  __device__ void flush() {
    if (pending < 0) return;
    if (lane == 0) {
      bulk_wait<0>();
      __threadfence();
      add_release_gpu(p.routes.counters + pending, 1);
    }
    pending = -1;
  }

  // 16 rows x 64 columns of this warp: registers -> swizzled shared memory -> TMA store
  template <class Pair>
  __device__ void store(const TensorMap* map, int32_t column, int32_t row, bool valid, Pair pair) {
    if (lane == 0) bulk_wait_read<kStoreBuffers - 1>();
    __syncwarp();
    const uint32_t buf = sh.store_buffer(warp, buffer);
    const uint32_t line = buf + (lane & 15) * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t v[4];
      pair(j, v);
      pair(j + 1, v + 2);
      const uint32_t at = line + (((j + (lane >> 4)) ^ (lane & 7)) << 4);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]),
                   "r"(v[2]), "r"(v[3])
                   : "memory");
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      if (valid) tma_store_2d(map, buf, column, row);
      bulk_commit();
    }
    buffer ^= 1;
  }
};

__device__ inline void compute(const ForwardParams& p, const Shared& sh, uint32_t cta, int warp, int lane) {
  MathWarp me{p, sh, cta, warp, lane};
  Ring<kStages> stage;
  Ring<kRing> ring;
  float acc[128];
  const uint64_t a0 = descriptor(sh.stage(0) + (warp >> 2) * (kBytesA / 2), false);
  const uint64_t b0 = descriptor(sh.stage(0) + kBytesA, true);
  auto release = [&](uint32_t s) {
    if (lane < kClusterCtas) barrier_arrive_at(sh.empty(s), lane);
  };
  for (;;) {
    // Somebody may wait for my stores before the next task can come: don't sleep on it with a signal in the pocket.
    if (!barrier_test(sh.task_full(ring.slot), ring.parity)) me.flush();
    barrier_wait(sh.task_full(ring.slot), ring.parity);
    const uint32_t ticket = load_shared(sh.task(ring.slot));
    __syncwarp();
    if (lane == 0) barrier_arrive_at(sh.task_empty(ring.slot), 0);
    ring.advance();
    if (ticket == kStop) break;
    const PairTask t = p.routes.tasks[ticket];
    const int blocks = t.kind == 0 ? kGateUpBlocks : kDownBlocks;
    uint32_t previous = 0;
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      barrier_wait(sh.full(stage.slot), stage.parity);
      wgmma_fence();
      const uint64_t a = a0 + stage.slot * (kBytesStage >> 4), b = b0 + stage.slot * (kBytesStage >> 4);
      wgmma_m64n256k16(acc, a, b, k > 0);
      wgmma_m64n256k16(acc, a + (kStepK >> 4), b + (kStepMN >> 4), true);
      wgmma_m64n256k16(acc, a + 2 * (kStepK >> 4), b + 2 * (kStepMN >> 4), true);
      wgmma_m64n256k16(acc, a + 3 * (kStepK >> 4), b + 3 * (kStepMN >> 4), true);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      if (k == 2) me.flush();
      previous = stage.slot;
      stage.advance();
    }
    wgmma_wait<0>();
    release(previous);
    me.flush();

    const int32_t row = p.routes.pair_row[t.pair] + int32_t(cta) * kBlockM + warp * kStoreRows;
    const bool valid = int32_t(cta) * kBlockM < p.routes.pair_rows[t.pair];
    if (t.kind == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        me.store(&p.hidden_out, t.tile * 128 + half * 64, row, valid, [&](int j, uint32_t* v) {
          swiglu4(acc + half * 64 + j * 4, acc + half * 64 + 32 + j * 4, v);
        });
      me.pending = Counter::hidden(t.pair, p.max_pairs);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        me.store(&p.y_out, t.tile * 256 + c * 64, row, valid, [&](int j, uint32_t* v) {
          v[0] = pack_bf16(acc[c * 32 + j * 4], acc[c * 32 + j * 4 + 1]);
          v[1] = pack_bf16(acc[c * 32 + j * 4 + 2], acc[c * 32 + j * 4 + 3]);
        });
      me.pending = Counter::out(t.pair, p.max_pairs);
    }
  }
  me.flush();
}

// ---- movers: rows in, sums out ----

constexpr int kVectors = kHidden / 8;  // 16-byte vectors of a row

__device__ inline void pull_rows(const ForwardParams& p, int lane) {
  const int32_t rows = p.routes.totals[1];
  for (;;) {
    uint32_t chunk = 0;
    if (lane == 0) chunk = atomicAdd(p.routes.counters + Counter::pull_ticket, 1u);
    chunk = __shfl_sync(~0u, chunk, 0);
    const int64_t first = int64_t(chunk) * kPullRows;
    if (first >= rows) return;
    for (int64_t row = first; row < first + kPullRows; ++row) {
      const int32_t token = p.routes.row_source[row];
      const uint4* src = reinterpret_cast<const uint4*>(p.x + int64_t(token) * kHidden);
      uint4* dst = reinterpret_cast<uint4*>(p.rows_in + row * kHidden);
      for (int v0 = lane; v0 < kVectors; v0 += 32 * 8) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          v[i] = token >= 0 && v0 + 32 * i < kVectors ? __ldg(src + v0 + 32 * i) : uint4{0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (v0 + 32 * i < kVectors) dst[v0 + 32 * i] = v[i];
      }
    }
    __threadfence();
    __syncwarp();
    // Rows of a chunk are rows of one pair: pairs start on a multiple of 128.
    if (lane == 0) add_release_gpu(p.routes.counters + Counter::pulled(p.routes.row_pair[first]), kPullRows);
  }
}

__device__ inline float from_bf16(uint32_t half) { return __uint_as_float(half << 16); }

// y_t = sum over k, ascending, of w_tk y_tk
__device__ inline void combine_tokens(const ForwardParams& p, int lane) {
  for (;;) {
    uint32_t token = 0;
    if (lane == 0) token = atomicAdd(p.routes.counters + Counter::combine_ticket, 1u);
    token = __shfl_sync(~0u, token, 0);
    if (token >= p.tokens) return;
    const int32_t* slot_row = p.routes.slot_row + int64_t(token) * kTopK;
    bool ready = !call_failed(p);
    for (int k = lane; k < kTopK && ready; k += 32)
      if (slot_row[k] >= 0)
        ready = wait_counter(p, Counter::out(p.routes.row_pair[slot_row[k]], p.max_pairs), kDownSignals);
    ready = __all_sync(~0u, ready);
    for (int v = lane; v < kVectors; v += 32) {
      uint4* out = reinterpret_cast<uint4*>(p.y + int64_t(token) * kHidden) + v;
      if (!ready) {
        *out = uint4{~0u, ~0u, ~0u, ~0u};  // NaN
        continue;
      }
      float sum[8] = {};
#pragma unroll 4
      for (int k = 0; k < kTopK; ++k) {
        const int32_t row = slot_row[k];
        if (row < 0) continue;
        const float w = p.router_weights[int64_t(token) * kTopK + k];
        const uint4 q = *(reinterpret_cast<const uint4*>(p.rows_y + int64_t(row) * kHidden) + v);
        const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[2 * i] += w * from_bf16(words[i] & 0xffff);
          sum[2 * i + 1] += w * from_bf16(words[i] >> 16);
        }
      }
      *out = uint4{pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                   pack_bf16(sum[6], sum[7])};
    }
  }
}

}  // namespace mok::sm90

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    mok_forward(const __grid_constant__ mok::ForwardParams p) {
  using namespace mok::sm90;
  extern __shared__ __align__(1024) char memory[];
  const Shared sh{shared_address(memory)};
  const uint32_t cta = cluster_rank();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(sh.full(s), 1);
      barrier_init(sh.empty(s), kMathWarps * kClusterCtas);
    }
    for (int i = 0; i < kRing; ++i) {
      barrier_init(sh.task_full(i), 1);
      barrier_init(sh.task_empty(i), (kMathWarps + 1) * kClusterCtas);
    }
    barriers_visible();
    fence_async_shared();
  }
  __syncthreads();
  cluster_sync();
  if (warp < 4) {
    give_registers<72>();
    if (warp == 0) {
      if (lane == 0) produce(p, sh, cta);
    } else {
      pull_rows(p, lane);
      combine_tokens(p, lane);
    }
    __syncwarp();
  } else {
    take_registers<216>();
    compute(p, sh, cta, warp - 4, lane);
    if (lane == 0) bulk_wait<0>();
    __syncwarp();
  }
  cluster_sync();
}
