// Backward megakernel for Hopper: every gradient of one rank's experts, from x, dY and the router weights.
//
//   movers    dY, x, w -> routed rows, as the stream will need them ........... | dX rows summed per token -> dX, dw
//   producer       tiles by TMA, in the order of BackwardOrder
//   math              [g, u = x W_g, x W_u]              gate_up, unless the forward pass saved them
//                     dhu = dY W_d^T -> d_g, d_u, hw, partial <dhu, silu(g) u>         hidden_grad
//                     dX rows = d_g W_g^T + d_u W_u^T                                  input_grad
//                     dW_d = hw^T dY ; dW_g = x^T d_g ; dW_u = x^T d_u                 weight gradients, per expert
//
// Clusters of two CTAs take a task together: 256 x 256 outputs, CTA r on 128 rows of them, each loading half of the right
// operand for both. In an expert's odd last row block they work on the same 128 rows, CTA r on column tile n + r.
// No operand is transposed in memory: wgmma reads weights and rows along K or across it. Every output element has one
// owner, which sums its products in one order; padding rows are zeros all the way.
#include "../backward_params.h"
#include "../../core/backward_tasks.h"
#include "../movers.h"
#include "pipeline.h"

// Compile-time shape: MOK_HIDDEN, MOK_INTER, MOK_TOP_K, MOK_SHARED_INTER, MOK_SAVE (1: g, u and rows of x saved),
// MOK_WEIGHT_GRAD_F32 (1: weight gradients leave as they were summed, 0: rounded to bf16).
namespace mok::sm90 {

constexpr int kHidden = MOK_HIDDEN, kInter = MOK_INTER, kShared = MOK_SHARED_INTER;
constexpr bool kRecompute = !MOK_SAVE, kWeightGradF32 = MOK_WEIGHT_GRAD_F32;
constexpr int kSwigluStages = 4;  // of g and u beside a tile of dhu, 64 columns each
__device__ constexpr int k_blocks(int width) { return (width + kBlockK - 1) / kBlockK; }
__device__ constexpr int wide_tiles(int width) { return (width + kBlockN - 1) / kBlockN; }
__device__ constexpr uint32_t signals(int tiles, bool split) {
  return uint32_t(tasks_of_pair(tiles, split)) * kMathWarps * kClusterCtas;
}
constexpr int kHiddenTiles = (kHidden + kBlockN - 1) / kBlockN, kInterTiles = (kInter + kBlockN - 1) / kBlockN;
__device__ constexpr DownSignals kInputSignals = {signals(kHiddenTiles, false), signals(kHiddenTiles, true)};

static_assert(kHidden % 8 == 0 && kInter % 8 == 0 && kShared % 8 == 0, "rows must be multiples of 16 bytes for TMA");

// A task and what the tables know of it.
struct BackwardWork {
  BackwardKind kind;
  int16_t shared, split;  // split: both CTAs work on the same rows, on neighbouring column tiles
  int32_t expert;         // local; the shared expert stands behind the others
  int32_t pair, m, n;
  int32_t row;            // first row of the pair or of the expert
  int32_t blocks;         // of K

  __device__ int32_t depth() const { return shared ? 0 : expert; }  // in the weights' arrays
  __device__ int32_t row_of(uint32_t cta) const { return split ? row : row + int32_t(cta) * kBlockM; }
  __device__ int32_t column_tile(uint32_t cta) const { return split ? n + int32_t(cta) : n; }
};

// Two boxes of 64 x 64 of an operand: one under the other if K runs along its rows, else side by side.
struct Boxes {
  const TensorMap* map;
  int32_t x, y, z;
  Major major;
};

struct BackwardStream {
  using Task = BackwardWork;
  static constexpr BackwardKind kStop = BackwardKind(-1);
  const BackwardParams& p;

  __device__ const BackwardMaps& maps(const BackwardWork& t) const { return t.shared ? p.shared : p.routed; }
  __device__ static int inter(const BackwardWork& t) { return t.shared ? kShared : kInter; }

  // ---- tasks ----

  __device__ static BackwardOrder order(int width, int32_t pairs, int32_t experts, bool shared) {
    return {{kRecompute ? (width + 127) / 128 : 0, wide_tiles(width), kHiddenTiles}, wide_tiles(width), kHiddenTiles,
            pairs, experts, shared};
  }
  __device__ int32_t shared_pairs() const { return kShared > 0 ? int32_t((p.tokens + 2 * kBlockM - 1) / (2 * kBlockM)) : 0; }
  __device__ BackwardTasks tasks() const {
    return {order(kShared > 0 ? kShared : 8, shared_pairs(), kShared > 0, true),
            order(kInter, __ldg(p.routes.totals + Total::pairs), p.local_experts, false)};
  }
  __device__ uint32_t count() const { return has_failed(p.call) ? 0 : uint32_t(tasks().count()); }
  // A split pair's odd column tiles are done with the even ones.
  __device__ uint32_t take() const {
    for (const uint32_t all = count();;) {
      const uint32_t ticket = atomicAdd(counter(Counter::ticket), 1u);
      if (ticket >= all) return ticket;
      const BackwardTask t = tasks().task(int32_t(ticket));
      if (is_wgrad(t.kind) || t.n % 2 == 0 || !__ldg(p.routes.pair_split + pair_of(t))) return ticket;
    }
  }
  __device__ BackwardWork task(uint32_t ticket) const {
    const BackwardTask t = tasks().task(int32_t(ticket));
    return is_wgrad(t.kind) ? weight_work(t) : row_work(t);
  }
  __device__ int32_t pair_of(const BackwardTask& t) const {
    return t.of + (t.shared ? int32_t(p.max_pairs) - shared_pairs() : 0);
  }

  __device__ BackwardWork row_work(const BackwardTask& t) const {
    const int32_t pair = pair_of(t);
    const int32_t expert = t.shared ? p.local_experts : __ldg(p.routes.pair_expert + pair);
    const int width = t.shared ? kShared : kInter;
    const int blocks = t.kind == BackwardKind::input_grad ? 2 * k_blocks(width) : k_blocks(kHidden);
    const auto split = int16_t(__ldg(p.routes.pair_split + pair));
    return {t.kind, t.shared, split, expert, pair, 0, t.n, __ldg(p.routes.pair_row + pair), blocks};
  }
  __device__ int32_t rows_of(int32_t expert) const {
    if (expert == p.local_experts) return int32_t(p.tokens);
    return __ldg(&p.routes.sources[(expert + 1) * int64_t{p.call.ranks} - 1].end);
  }
  // An expert without rows multiplies one block of zeros, which TMA makes of rows beyond the end.
  __device__ BackwardWork weight_work(const BackwardTask& t) const {
    const int32_t expert = t.shared ? p.local_experts : __ldg(p.routes.by_length + t.of), rows = rows_of(expert);
    const int32_t start = t.shared ? 0 : __ldg(p.routes.segment_start + __ldg(p.call.coords) * p.local_experts + expert);
    return {t.kind, t.shared, 0, expert, 0, t.m, t.n, rows == 0 ? int32_t(p.max_rows) : start,
            rows == 0 ? 1 : k_blocks(rows)};
  }
  __device__ int blocks(const BackwardWork& t) const {
    return t.blocks + (t.kind == BackwardKind::hidden_grad ? kSwigluStages : 0);
  }

  // ---- counters ----

  __device__ uint32_t* counter(int64_t word) const { return p.routes.counters + word; }
  __device__ Counter words() const { return {p.max_pairs, p.local_experts}; }

  // What a task waits for: a counter that reaches its target. The shared expert's rows are there from the start.
  struct Need {
    int64_t word;
    uint32_t target;
  };
  __device__ Need need(const BackwardWork& t) const {
    const int tiles = wide_tiles(inter(t));
    const int32_t row_blocks = is_wgrad(t.kind) ? (rows_of(t.expert) + kBlockM - 1) / kBlockM : 0;
    switch (t.kind) {
      case BackwardKind::hidden_grad:
        if (kRecompute) return {words().hidden(t.pair), signals((inter(t) + 127) / 128, t.split)};
      [[fallthrough]];
      case BackwardKind::gate_up: return {words().pulled(t.pair), t.shared ? 0u : t.split ? kBlockM : 2 * kBlockM};
      case BackwardKind::input_grad: return {words().hidden_grad(t.pair), signals(tiles, t.split)};
      default:
        return {words().expert(t.expert),
                row_blocks / 2 * signals(tiles, false) + row_blocks % 2 * signals(tiles, true)};
    }
  }
  __device__ bool ready(const BackwardWork& t) const {
    const Need n = need(t);
    return !has_failed(p.call) && wait_counter(p.call, counter(n.word), n.target);
  }
  // Rows were written by ordinary stores of other SMs, and TMA reads them next. The dealer has seen the target reached.
  __device__ void acquire(const BackwardWork& t) const {
    const Need n = need(t);
    while (load_acquire_gpu(counter(n.word)) < n.target) {}
    fence_async_global();
  }

  // `pending` is the pair's counter of a row task.
  __device__ void signal(int64_t pending, int lane) const {
    const int64_t in_hidden_grad = pending - words().hidden_grad(0), in_out = pending - words().out(0);
    bool last = false;
    if (lane == 0) {
      fence_gpu();
      if (in_out >= 0 && p.call.ranks > 1) {
        const uint32_t all = p.routes.pair_split[in_out] ? kInputSignals.split : kInputSignals.full;
        last = add_acquire_release_gpu(counter(pending), 1) + 1 == all;
      } else {
        add_gpu(counter(pending), 1);
      }
      if (in_hidden_grad >= 0 && in_out < 0) add_gpu(counter(words().expert(expert_of_pair(in_hidden_grad))), 1);
    }
    if (__any_sync(~0u, last) && in_out < p.max_pairs - shared_pairs()) send_rows_home(in_out, lane);
  }
  __device__ int32_t expert_of_pair(int64_t pair) const {
    return pair < p.max_pairs - shared_pairs() ? __ldg(p.routes.pair_expert + pair) : p.local_experts;
  }
  // The pair's rows are complete: the router gradients beside them, then the flags of the ranks whose rows they are.
  __device__ void send_rows_home(int64_t pair, int lane) const {
    const bool split = p.routes.pair_split[pair];
    load_acquire_gpu(counter(words().hidden_grad(pair)));  // complete long since: this acquires the dots
    const int32_t row = p.routes.pair_row[pair];
    for (int32_t i = lane; i < (split ? kBlockM : 2 * kBlockM); i += 32) p.row_dw[row + i] = sum_dots(row + i);
    __syncwarp();
    flag_homes(p, pair, lane);
  }
  __device__ float sum_dots(int64_t row) const {
    float sum = 0.0f;
    for (int tile = 0; tile < kInterTiles; ++tile) sum += __ldcg(p.dots + tile * p.max_rows + row);
    return sum;
  }

  // ---- loads ----

  // Block k of the left operand: this CTA's 128 rows of the output.
  __device__ Boxes left(const BackwardWork& t, int k, uint32_t cta) const {
    const int32_t column = k * kBlockK, row = t.row_of(cta);
    const int32_t m = t.m * 2 * kBlockM + int32_t(cta) * kBlockM, in_expert = t.row + k * kBlockK;
    const BackwardMaps& of = maps(t);
    const int first = k_blocks(inter(t));  // of input_grad's two K loops
    switch (t.kind) {
      case BackwardKind::gate_up: return {&of.x, column, row, 0, Major::k};
      case BackwardKind::hidden_grad: return {&of.dy, column, row, 0, Major::k};
      case BackwardKind::input_grad:
        return k < first ? Boxes{&of.d_g, column, row, 0, Major::k}
                         : Boxes{&of.d_u, column - first * kBlockK, row, 0, Major::k};
      case BackwardKind::down_wgrad: return {&of.hw, m, in_expert, 0, Major::mn};
      default: return {&of.x, m, in_expert, 0, Major::mn};
    }
  }
  // Block k of the right operand: one half of the output's 256 columns.
  __device__ Boxes right(const BackwardWork& t, int k, uint32_t cta, uint32_t half) const {
    const int32_t column = k * kBlockK, n = t.column_tile(cta) * kBlockN + int32_t(half) * (kBlockN / 2);
    const int32_t in_expert = t.row + column;
    const BackwardMaps& of = maps(t);
    const int first = k_blocks(inter(t));  // of input_grad's two K loops
    switch (t.kind) {
      case BackwardKind::gate_up:
        return {half == 0 ? &of.w_gate : &of.w_up, t.column_tile(cta) * 128, column, t.depth(), Major::mn};
      case BackwardKind::hidden_grad: return {&of.w_down, column, n, t.depth(), Major::k};
      case BackwardKind::input_grad:
        return k < first ? Boxes{&of.w_gate, column, n, t.depth(), Major::k}
                         : Boxes{&of.w_up, column - first * kBlockK, n, t.depth(), Major::k};
      case BackwardKind::down_wgrad: return {&of.dy, n, in_expert, 0, Major::mn};
      case BackwardKind::gate_wgrad: return {&of.d_g, n, in_expert, 0, Major::mn};
      default: return {&of.d_u, n, in_expert, 0, Major::mn};
    }
  }
  // g and u beside 64 columns of dhu.
  __device__ void load_swiglu(const BackwardWork& t, int chunk, uint32_t cta, uint32_t stage, uint32_t bar) const {
    const int32_t column = t.column_tile(cta) * kBlockN + chunk * 64, row = t.row_of(cta);
    barrier_expect(bar, 2 * kBytesA);
    load_boxes({&maps(t).g, column, row, 0, Major::k}, stage, bar);
    load_boxes({&maps(t).u, column, row, 0, Major::k}, stage + kBytesA, bar);
  }

  __device__ static void load_boxes(const Boxes& b, uint32_t to, uint32_t bar, bool both_ctas = false) {
    for (int i = 0; i < 2; ++i) {
      const int32_t x = b.x + (b.major == Major::mn ? 64 * i : 0), y = b.y + (b.major == Major::k ? 64 * i : 0);
      if (both_ctas) tma_load_3d_multicast(to + i * kBytesColumns, b.map, bar, x, y, b.z, 3);
      else tma_load_3d(to + i * kBytesColumns, b.map, bar, x, y, b.z);
    }
  }
  __device__ void load(const BackwardWork& t, int k, uint32_t cta, uint32_t stage, uint32_t bar) const {
    if (k >= t.blocks) return load_swiglu(t, k - t.blocks, cta, stage, bar);
    barrier_expect(bar, kBytesStage);
    load_boxes(left(t, k, cta), stage, bar);
    const uint32_t to = stage + kBytesA;
    if (t.split) {
      load_boxes(right(t, k, cta, 0), to, bar);
      load_boxes(right(t, k, cta, 1), to + kBytesB / 2, bar);
    } else {
      load_boxes(right(t, k, cta, cta), to + cta * (kBytesB / 2), bar, true);
    }
  }

  // ---- math ----

  template <class Math>
  __device__ void multiply(Math& me, float (&acc)[128], const BackwardWork& t) const {
    me.multiply(t.blocks, [&](bool accumulate) {
      if (is_wgrad(t.kind)) me.template multiply_block<Major::mn, Major::mn>(acc, accumulate);
      else if (kRecompute && t.kind == BackwardKind::gate_up) me.template multiply_block<Major::k, Major::mn>(acc, accumulate);
      else me.template multiply_block<Major::k, Major::k>(acc, accumulate);
    });
  }

  template <class Math>
  __device__ void store(Math& me, float (&acc)[128], const BackwardWork& t) const {
    const int32_t row = t.row_of(me.cta) + me.warp * kStoreRows, n = t.column_tile(me.cta);
    const int32_t m = t.m * 2 * kBlockM + int32_t(me.cta) * kBlockM + me.warp * kStoreRows;
    const BackwardMaps& of = maps(t);
    switch (t.kind) {
      case BackwardKind::gate_up:
        store_columns<0, 2>(me, acc, &of.to_g, n * 128, row, 0);
        store_columns<2, 4>(me, acc, &of.to_u, n * 128, row, 0);
        me.pending = words().hidden(t.pair);
        break;
      case BackwardKind::hidden_grad:
        store_hidden_grad(me, acc, t, n, row);
        me.pending = words().hidden_grad(t.pair);
        break;
      case BackwardKind::input_grad:
        store_columns<0, 4>(me, acc, &of.to_dx, n * kBlockN, row, 0);
        me.pending = words().out(t.pair);
        break;
      default: store_weight_grad(me, acc, weight_grad(t), n * kBlockN, m, t.depth());
    }
  }

  // Accumulator columns 64 kFirst .. 64 kLast - 1, rounded, to column x on. What is out of bounds is not written.
  template <int kFirst, int kLast, class Math>
  __device__ static void store_columns(Math& me, float (&acc)[128], const TensorMap* map, int32_t x, int32_t y, int32_t z) {
#pragma unroll
    for (int c = kFirst; c < kLast; ++c)
      me.store([&](uint32_t from) { tma_store_3d(map, from, x + (c - kFirst) * 64, y, z); },
               [&](int j, uint32_t* v) {
                 v[0] = pack_bf16(acc[c * 32 + j * 4], acc[c * 32 + j * 4 + 1]);
                 v[1] = pack_bf16(acc[c * 32 + j * 4 + 2], acc[c * 32 + j * 4 + 3]);
               });
  }

  __device__ const TensorMap* weight_grad(const BackwardWork& t) const {
    const BackwardMaps& of = maps(t);
    if (t.kind == BackwardKind::down_wgrad) return &of.to_down_grad;
    return t.kind == BackwardKind::gate_wgrad ? &of.to_gate_grad : &of.to_up_grad;
  }
  // All 256 columns, rounded to bf16 or as they are. Called in one place: with three copies, math warps would spill.
  template <class Math>
  __device__ static void store_weight_grad(Math& me, float (&acc)[128], const TensorMap* map, int32_t x, int32_t y,
                                           int32_t z) {
    if constexpr (kWeightGradF32) {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        me.store_floats([&](uint32_t from) { tma_store_3d(map, from, x + c * 32, y, z); }, acc + c * 16);
    } else {
      store_columns<0, 4>(me, acc, map, x, y, z);
    }
  }

  template <class Math>
  __device__ void store_hidden_grad(Math& me, float (&acc)[128], const BackwardWork& t, int32_t tile, int32_t row) const;
};

// ---- hidden_grad's epilogue ----

__device__ inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two columns of two rows: d = dhu -> packed d_g, d_u and hw = w s of each row, with s = silu(g) u; dot[row] += <dhu, s>.
// One reciprocal serves four sigmoids, see swiglu4 in forward.cu.
__device__ inline void swiglu_grad4(const float* d, const uint32_t (&g_pairs)[2], const uint32_t (&u_pairs)[2],
                                    const float (&w)[2], float (&dot)[2], uint32_t* out_g, uint32_t* out_u,
                                    uint32_t* out_hw) {
  float g[4], u[4], a[4], sigmoid[4], d_g[4], d_u[4], hw[4], r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    g[i] = i % 2 ? high_bf16(g_pairs[i / 2]) : low_bf16(g_pairs[i / 2]);
    u[i] = i % 2 ? high_bf16(u_pairs[i / 2]) : low_bf16(u_pairs[i / 2]);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a[i]) : "f"(fminf(g[i] * -1.4426950408889634f, 30.0f)));
    a[i] += 1.0f;
  }
  const float a01 = a[0] * a[1], a23 = a[2] * a[3];
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a01 * a23));
  const float r01 = r * a23, r23 = r * a01;
  sigmoid[0] = r01 * a[1], sigmoid[1] = r01 * a[0], sigmoid[2] = r23 * a[3], sigmoid[3] = r23 * a[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float silu = g[i] * sigmoid[i], s = silu * u[i], dh = w[i / 2] * d[i];
    dot[i / 2] += d[i] * s;
    d_g[i] = dh * u[i] * (sigmoid[i] + silu * (1.0f - sigmoid[i]));
    d_u[i] = dh * silu;
    hw[i] = w[i / 2] * s;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    out_g[i] = pack_bf16(d_g[2 * i], d_g[2 * i + 1]);
    out_u[i] = pack_bf16(d_u[2 * i], d_u[2 * i + 1]);
    out_hw[i] = pack_bf16(hw[2 * i], hw[2 * i + 1]);
  }
}

// Each warp reads its 16 rows of g and u from the stages that follow the K blocks, 64 columns at a time, and writes d_g
// and d_u in their place and hw behind them; TMA stores all three from there. A stage goes back when they are read.
template <class Math>
__device__ void BackwardStream::store_hidden_grad(Math& me, float (&acc)[128], const BackwardWork& t, int32_t tile,
                                                  int32_t row) const {
  const BackwardMaps& of = maps(t);
  const int r = me.lane >> 2;
  float w[2] = {1.0f, 1.0f};
  if (!t.shared) w[0] = __ldcg(p.row_weight + row + r), w[1] = __ldcg(p.row_weight + row + r + 8);
  float dot[2] = {};
  uint32_t previous = 0;
  auto release_previous = [&] {
    if (me.lane == 0) bulk_wait_read<0>();
    __syncwarp();
    me.release(previous);
  };
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint32_t slot = me.next_stage(), g_rows = me.sh.stage(slot) + me.warp * kStoreRows * 128;
    const uint32_t u_rows = g_rows + kBytesA, hw_rows = u_rows + kBytesA;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t d_g[4], d_u[4], hw[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t at = r * 128 + (((j + i) ^ r) << 4) + (me.lane & 3) * 4;
        const uint32_t g[2] = {load_shared(g_rows + at), load_shared(g_rows + at + 8 * 128)};
        const uint32_t u[2] = {load_shared(u_rows + at), load_shared(u_rows + at + 8 * 128)};
        swiglu_grad4(acc + c * 32 + (j + i) * 4, g, u, w, dot, d_g + 2 * i, d_u + 2 * i, hw + 2 * i);
      }
      __syncwarp();
      me.write_columns(g_rows, j, d_g);
      me.write_columns(u_rows, j, d_u);
      me.write_columns(hw_rows, j, hw);
    }
    fence_async_shared();
    if (c > 0) release_previous();
    __syncwarp();
    if (me.lane == 0) {
      const int32_t column = tile * kBlockN + c * 64;
      tma_store_3d(&of.to_d_g, g_rows, column, row, 0);
      tma_store_3d(&of.to_d_u, u_rows, column, row, 0);
      tma_store_3d(&of.to_hw, hw_rows, column, row, 0);
      bulk_commit();
    }
    previous = slot;
  }
  release_previous();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    dot[i] += __shfl_xor_sync(~0u, dot[i], 1);
    dot[i] += __shfl_xor_sync(~0u, dot[i], 2);
    if (me.lane % 4 == 0 && tile < kInterTiles && !t.shared) p.dots[tile * p.max_rows + row + r + 8 * i] = dot[i];
  }
}

// ---- movers ----

struct BackwardHooks {
  const BackwardParams& p;
  const BackwardStream& stream;

  __device__ const uint8_t* rows_of(int32_t rank) const {
    return reinterpret_cast<const uint8_t*>(p.routes.peers[rank]) + SeatMemory::rows;
  }
  __device__ static float load_float(const uint8_t* array, int64_t i) {
    return __int_as_float(load_system(reinterpret_cast<const int32_t*>(array) + i));
  }

  __device__ void pulled(int64_t row, int32_t rank, int32_t slot) const {
    if (slot < 0) p.row_weight[row] = 0.0f;
    else if (p.call.ranks == 1) p.row_weight[row] = p.router_weights[slot];
    else p.row_weight[row] = load_float(rows_of(rank) + p.layout.weights, slot);
  }
  __device__ void fetched(int32_t slot, int32_t owner, int32_t row) const {
    p.dw[slot] = load_float(rows_of(owner) + p.layout.weight_grads, row);
  }
  __device__ float weight(int64_t) const { return 1.0f; }
  __device__ void summed(int64_t slot, int64_t row) const { p.dw[slot] = row < 0 ? 0.0f : stream.sum_dots(row); }
  __device__ void failed(int64_t slot) const { p.dw[slot] = __uint_as_float(~0u); }
};

// After a failure: NaN over the weight gradients. A tile in flight may still be stored over it.
__device__ inline void poison_weight_grads(const BackwardParams& p, int lane) {
  constexpr int64_t kPiece = 1 << 16;
  for (;;) {
    uint32_t ticket = 0;
    if (lane == 0) ticket = atomicAdd(p.routes.counters + Counter::poison_ticket, 1u);
    int64_t at = __shfl_sync(~0u, ticket, 0);  // then: piece of array i
    int i = 0;
    for (; i < BackwardParams::kWeightGrads && at * kPiece >= p.weight_grads[i].bytes; ++i)
      at -= ceil_div(p.weight_grads[i].bytes, kPiece);
    if (i == BackwardParams::kWeightGrads) return;
    uint32_t* words = static_cast<uint32_t*>(p.weight_grads[i].at);
    const int64_t end = min_of(p.weight_grads[i].bytes, (at + 1) * kPiece) / 4;
    for (int64_t w = at * kPiece / 4 + lane; w < end; w += 32) words[w] = ~0u;
  }
}

}  // namespace mok::sm90

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    mok_backward(const __grid_constant__ mok::BackwardParams p) {
  using namespace mok::sm90;
  extern __shared__ __align__(1024) char memory[];
  const Shared sh{shared_address(memory)};
  const BackwardStream stream{p};
  const BackwardHooks hooks{p, stream};
  const uint32_t cta = cluster_rank();
  const int warp = threadIdx.x >> 5;
  sh.init();
  if (warp < 4) {
    give_registers<kProducerRegisters>();
    const mok::Movers<BackwardHooks> movers{p, hooks, lane_id()};
    if (warp == 0) {
      if (lane_id() == 0) produce(stream, sh, cta);
      __syncwarp();
    } else if (warp == 1 && cta == 0) {
      if (lane_id() == 0) deal(stream, sh);
      __syncwarp();
    } else {
      movers.pull();
      if (p.call.ranks > 1 && warp != 3) movers.fetch();  // the last warp sums meanwhile
      movers.combine<4>(kInputSignals);
    }
    if (p.call.ranks > 1 && blockIdx.x == 0 && warp == 2) movers.leave();
    if (__any_sync(~0u, mok::has_failed(p.call))) poison_weight_grads(p, lane_id());
  } else {
    take_registers<kMathRegisters>();
    compute(stream, sh, cta, warp - 4, lane_id());
  }
  cluster_sync();
}
