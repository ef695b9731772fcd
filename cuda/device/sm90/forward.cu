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
#include "pipeline.h"

// Compile-time shape: MOK_HIDDEN, MOK_INTER, MOK_TOP_K.
namespace mok::sm90 {

constexpr int kHidden = MOK_HIDDEN, kInter = MOK_INTER, kTopK = MOK_TOP_K;
constexpr int kGateUpBlocks = (kHidden + kBlockK - 1) / kBlockK, kDownBlocks = (kInter + kBlockK - 1) / kBlockK;
constexpr int kGateUpTiles = (kInter + 127) / 128, kDownTiles = (kHidden + 255) / 256;
constexpr uint32_t kGateUpSignals = kGateUpTiles * kMathWarps * kClusterCtas;
constexpr uint32_t kDownSignals = kDownTiles * kMathWarps * kClusterCtas;
constexpr int kPullRows = 8;  // rows that a mover warp takes at a time

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

// The tasks of the forward pass, for the pipeline.
struct ForwardStream {
  const ForwardParams& p;

  __device__ uint32_t count() const { return uint32_t(p.routes.totals[0]); }
  __device__ uint32_t take() const { return atomicAdd(p.routes.counters + Counter::ticket, 1u); }
  __device__ PairTask task(uint32_t ticket) const { return p.routes.tasks[ticket]; }
  __device__ int blocks(const PairTask& t) const { return t.kind == 0 ? kGateUpBlocks : kDownBlocks; }

  __device__ bool ready(const PairTask& t) const {
    const bool there = t.kind == 0
        ? wait_counter(p, Counter::pulled(t.pair), uint32_t(p.routes.pair_rows[t.pair]))
        : wait_counter(p, Counter::hidden(t.pair, p.max_pairs), kGateUpSignals);
    fence_async_global();  // what the counter released was written by ordinary stores; TMA reads it next
    return there && !call_failed(p);
  }

  __device__ void load(const PairTask& t, int k, uint32_t cta, uint32_t stage, uint32_t bar) const {
    const int32_t column = k * kBlockK, row = p.routes.pair_row[t.pair] + int32_t(cta) * kBlockM;
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

  template <class Math>
  __device__ void multiply(Math& me, float (&acc)[128], const PairTask& t) const {
    me.template multiply<Major::k, Major::mn>(acc, blocks(t));
  }

  template <class Math>
  __device__ void store(Math& me, float (&acc)[128], const PairTask& t) const {
    const int32_t row = p.routes.pair_row[t.pair] + int32_t(me.cta) * kBlockM + me.warp * kStoreRows;
    const bool valid = int32_t(me.cta) * kBlockM < p.routes.pair_rows[t.pair];
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

  __device__ void signal(int64_t counter, int lane) const {
    if (lane != 0) return;
    __threadfence();
    add_release_gpu(p.routes.counters + counter, 1);
  }
};

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
  const ForwardStream stream{p};
  const uint32_t cta = cluster_rank();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  sh.init();
  if (warp < 4) {
    give_registers<kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) produce(stream, sh, cta);
    } else {
      pull_rows(p, lane);
      combine_tokens(p, lane);
    }
    __syncwarp();
  } else {
    take_registers<kMathRegisters>();
    compute(stream, sh, cta, warp - 4, lane);
  }
  cluster_sync();
}
