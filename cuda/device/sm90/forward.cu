// Forward megakernel for Hopper: one rank's dispatch, expert MLPs and combine.
//
//   movers (3 warps a CTA)   x -> routed rows, as the stream will need them | results of other ranks | sums -> y
//   producer (1 warp)             tasks in order -> [rows | W_g W_u] tiles, [h | W_d] tiles by TMA
//   math (2 warpgroups)                      h = silu(x W_g) * (x W_u), y rows = h W_d ............... | sums -> y
//
// A call that fails fills its result with NaN, and the host hears of it.
#include "../movers.h"
#include "pipeline.h"

// Compile-time shape: MOK_HIDDEN, MOK_INTER, MOK_TOP_K, MOK_SHARED_INTER; MOK_SAVE: g and u are kept.
namespace mok::sm90 {

constexpr int kHidden = MOK_HIDDEN, kInter = MOK_INTER, kShared = MOK_SHARED_INTER;
constexpr int kDownTiles = (kHidden + 255) / 256;
__device__ constexpr int k_blocks(int width) { return (width + kBlockK - 1) / kBlockK; }
__device__ constexpr uint32_t signals(int tiles, bool split) {
  return uint32_t(tasks_of_pair(tiles, split)) * kMathWarps * kClusterCtas;
}
__device__ constexpr DownSignals kDownSignals = {signals(kDownTiles, false), signals(kDownTiles, true)};

static_assert(kHidden % 8 == 0 && kInter % 8 == 0, "rows of bf16 must be multiples of 16 bytes for TMA");

__device__ inline void pack4(const float* a, uint32_t* out) {
  out[0] = pack_bf16(a[0], a[1]);
  out[1] = pack_bf16(a[2], a[3]);
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

// A task of the forward pass, with what is to be known of its pair.
struct ForwardTask {
  int32_t kind;    // as in PairTask, or kStop
  int32_t expert, pair, tile;
  int32_t row;     // of CTA 0
  int32_t split;   // one row block and two neighbouring column tiles, not two row blocks
  int32_t unused[2];

  __device__ bool down() const { return kind & 1; }
  __device__ bool shared() const { return kind & 2; }
  __device__ int32_t row_of(uint32_t cta) const { return split ? row : row + int32_t(cta) * kBlockM; }
  __device__ int32_t tile_of(uint32_t cta) const { return split ? 2 * tile + int32_t(cta) : tile; }
};

// The tasks of the forward pass, for the pipeline.
struct ForwardStream {
  using Task = ForwardTask;
  static constexpr int32_t kStop = -1;
  const ForwardParams& p;

  __device__ uint32_t* counter(int64_t word) const { return p.routes.counters + word; }
  __device__ Counter words() const { return {p.max_pairs, p.local_experts}; }

  __device__ uint32_t count() const { return uint32_t(p.routes.totals[Total::tasks]); }
  __device__ uint32_t take() const { return atomicAdd(counter(Counter::ticket), 1u); }
  __device__ ForwardTask task(uint32_t ticket) const {
    const PairTask t = p.routes.tasks[ticket];
    return {t.kind, t.expert, t.pair, t.tile, p.routes.pair_row[t.pair], p.routes.pair_split[t.pair], {}};
  }
  __device__ int blocks(const ForwardTask& t) const {
    return !t.down() ? k_blocks(kHidden) : t.shared() ? k_blocks(kShared) : k_blocks(kInter);
  }

  // What the task waits for: a pair's hidden tiles, its routed rows, or (the shared expert's tokens) nothing.
  __device__ const uint32_t* awaited(const ForwardTask& t) const {
    return counter(t.down() ? words().hidden(t.pair) : words().pulled(t.pair));
  }
  __device__ uint32_t target(const ForwardTask& t) const {
    if (t.down()) return signals(((t.shared() ? kShared : kInter) + 127) / 128, t.split);
    return t.shared() ? 0 : t.split ? kBlockM : 2 * kBlockM;
  }
  __device__ bool ready(const ForwardTask& t) const {
    return !has_failed(p.call) && wait_counter(p.call, awaited(t), target(t));
  }
  // Rows were written by ordinary stores of other SMs, and TMA reads them next. The dealer has seen the target reached.
  __device__ void acquire(const ForwardTask& t) const {
    while (load_acquire_gpu(awaited(t)) < target(t)) {}
    fence_async_global();
  }

  // Four blocks of 64 columns: gate, up, gate, up, or down. A CTA loads two of them for both, in a split pair all four.
  __device__ void load(const ForwardTask& t, int k, uint32_t cta, uint32_t stage, uint32_t bar) const {
    const int32_t column = k * kBlockK, tile = t.tile_of(cta);
    barrier_expect(bar, kBytesStage);
    const TensorMap *rows, *even, *odd;
    if (t.shared()) {
      rows = t.down() ? &p.shared_hidden : &p.shared_rows;
      even = t.down() ? &p.shared_down : &p.shared_gate;
      odd = t.down() ? &p.shared_down : &p.shared_up;
    } else {
      rows = t.down() ? &p.hidden : &p.rows;
      even = t.down() ? &p.down : &p.gate;
      odd = t.down() ? &p.down : &p.up;
    }
    tma_load_2d(stage, rows, bar, column, t.row_of(cta));
    for (uint32_t block = t.split ? 0 : cta; block < 4; block += t.split ? 1 : 2) {
      const int32_t x = t.down() ? tile * 256 + int32_t(block) * 64 : tile * 128 + int32_t(block / 2) * 64;
      const uint32_t to = stage + kBytesA + block * kBytesColumns;
      const TensorMap* weights = block & 1 ? odd : even;
      if (t.split) tma_load_3d(to, weights, bar, x, column, t.expert);
      else tma_load_3d_multicast(to, weights, bar, x, column, t.expert, 3);
    }
  }

  template <class Math>
  __device__ void multiply(Math& me, float (&acc)[128], const ForwardTask& t) const {
    me.multiply(blocks(t), [&](bool accumulate) { me.template multiply_block<Major::k, Major::mn>(acc, accumulate); });
  }

  // Columns past the last are clipped; a split pair's second tile may lie behind them altogether.
  template <class Math>
  __device__ void store(Math& me, float (&acc)[128], const ForwardTask& t) const {
    const int32_t row = t.row_of(me.cta) + me.warp * kStoreRows, tile = t.tile_of(me.cta);
    if (!t.down()) {
      const bool valid = tile * 128 < (t.shared() ? kShared : kInter);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float *g = acc + half * 64, *u = g + 32;
        const int32_t column = tile * 128 + half * 64;
        me.store(t.shared() ? &p.shared_hidden_out : &p.hidden_out, column, row, valid,
                 [&](int j, uint32_t* v) { swiglu4(g + j * 4, u + j * 4, v); });
        if (!MOK_SAVE) continue;
        me.store(t.shared() ? &p.save_shared_gate : &p.save_gate, column, row, valid,
                 [&](int j, uint32_t* v) { pack4(g + j * 4, v); });
        me.store(t.shared() ? &p.save_shared_up : &p.save_up, column, row, valid,
                 [&](int j, uint32_t* v) { pack4(u + j * 4, v); });
      }
      me.pending = words().hidden(t.pair);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        me.store(t.shared() ? &p.shared_y_out : &p.y_out, tile * 256 + c * 64, row, tile * 256 < kHidden,
                 [&](int j, uint32_t* v) { pack4(acc + c * 32 + j * 4, v); });
      me.pending = words().out(t.pair);
    }
  }

  __device__ void signal(int64_t counter_word, int lane) const {
    const int64_t pair = counter_word - words().out(0);
    if (p.call.ranks == 1 || pair < 0) {
      if (lane == 0) add_release_gpu(counter(counter_word), 1);
      return;
    }
    bool last = false;
    if (lane == 0) {
      const uint32_t all = p.routes.pair_split[pair] ? kDownSignals.split : kDownSignals.full;
      last = add_acquire_release_gpu(counter(counter_word), 1) + 1 == all;
    }
    if (__any_sync(~0u, last) && pair < p.max_pairs - (kShared > 0 ? (p.tokens + 255) / 256 : 0)) flag_homes(p, pair, lane);
  }
};

struct ForwardHooks {
  const ForwardParams& p;
  __device__ void pulled(int64_t, int32_t, int32_t) const {}
  __device__ void fetched(int32_t, int32_t, int32_t) const {}
  __device__ float weight(int64_t slot) const { return p.router_weights[slot]; }
  __device__ void summed(int64_t, int64_t) const {}
  __device__ void failed(int64_t) const {}
};

}  // namespace mok::sm90

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    mok_forward(const __grid_constant__ mok::ForwardParams p) {
  using namespace mok::sm90;
  extern __shared__ __align__(1024) char memory[];
  const Shared sh{shared_address(memory)};
  const ForwardStream stream{p};
  const uint32_t cta = cluster_rank();
  const ForwardHooks hooks{p};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const mok::Movers<ForwardHooks> movers{p, hooks, lane};
  sh.init();
  if (warp < 4) {
    give_registers<kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) produce(stream, sh, cta);
      __syncwarp();
    } else if (warp == 1 && cta == 0) {
      if (lane == 0) deal(stream, sh);
      __syncwarp();
    } else {
      movers.pull();
      if (p.call.ranks > 1 && warp != 3) movers.fetch();  // the last warp sums meanwhile
    }
    movers.combine<4>(kDownSignals);
    if (p.call.ranks > 1 && blockIdx.x == 0 && warp == 1) movers.leave();
  } else {
    take_registers<kMathRegisters>();
    compute(stream, sh, cta, warp - 4, lane);
    movers.combine<8>(kDownSignals);
  }
  cluster_sync();
}
