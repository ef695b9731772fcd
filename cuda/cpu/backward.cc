// Backward:  dY, w (and x) -> arena | pull -> dY rows, w rows (x rows) -> [gate_up] -> hidden_grad -> d_g, d_u, w h, dw
//            -> input_grad -> dX rows (arena) | weight gradients per expert | combine -> dX, dw
#include <algorithm>
#include <cstring>
#include <utility>

#include "layer.h"
#include "segment.h"

namespace mok::cpu {
namespace {

class BackwardCall final : public LayerCall {
 public:
  BackwardCall(Group& group, uint64_t generation, const CallArgs& args, const SavedBuffers& saved, const void* dy,
               const BackwardResults& out)
      : LayerCall(group, generation, args), saved_(saved), dy_(dy), out_(out), recompute_(saved.rows == nullptr) {}

 private:
  struct Buffers {
    Matrix x, dy, gate, up, d_gate, d_up, weighted_hidden, dx;
  };

  void publish() override {
    copy(arena<uint8_t>(rank_, layout_.grads_in), dy_, shape_.tokens * row_bytes_);
    copy(arena<float>(rank_, layout_.weights), args_.router_weights, shape_.slots() * int64_t{sizeof(float)});
    if (recompute_) copy(arena<uint8_t>(rank_, layout_.tokens_in), args_.x, shape_.tokens * row_bytes_);
  }

  void plan(std::vector<Task>* tasks) override {
    allocate();
    backward_stream(stream_shape(recompute_), [&](const Task& t) { tasks->push_back(t); });
  }

  void allocate() {
    rows_ = int64_t{routed_blocks_} * kTiles.block_m;
    const int64_t e = shape_.elem_bytes, inter_bytes = shape_.inter * e, shared_bytes = shape_.shared_inter * e;
    ScratchPlan plan;
    const int64_t dy = plan.add(rows_ * row_bytes_);
    const int64_t x = plan.add(recompute_ ? rows_ * row_bytes_ : 0);
    int64_t wide[5], shared_wide[5];  // gate, up, d_gate, d_up, weighted hidden
    for (int i = 0; i < 5; ++i) {
      const bool needed = recompute_ || i >= 2;
      wide[i] = plan.add(needed ? rows_ * inter_bytes : 0);
      shared_wide[i] = plan.add(needed ? shape_.tokens * shared_bytes : 0);
    }
    const int64_t shared_dx = plan.add(shape_.shared_inter > 0 ? shape_.tokens * row_bytes_ : 0);
    const int64_t weights = plan.add(rows_ * int64_t{sizeof(float)});
    const int64_t dots = plan.add(rows_ * ceil_div(shape_.inter, kTiles.inter_n) * int64_t{sizeof(float)});
    uint8_t* base = plan.reserve(group_.scratch(rank_));

    auto either = [&](void* saved, int64_t at, int64_t columns) {
      return matrix_of(recompute_ ? base + at : saved, columns);
    };
    const int64_t H = shape_.hidden, I = shape_.inter, Is = shape_.shared_inter;
    routed_ = {either(saved_.rows, x, H),       matrix_of(base + dy, H),      either(saved_.gate, wide[0], I),
               either(saved_.up, wide[1], I),   matrix_of(base + wide[2], I), matrix_of(base + wide[3], I),
               matrix_of(base + wide[4], I),    matrix_of(arena<uint8_t>(rank_, layout_.rows_out), H)};
    shared_ = {matrix_of(args_.x, H),                         matrix_of(dy_, H),
               either(saved_.shared_gate, shared_wide[0], Is), either(saved_.shared_up, shared_wide[1], Is),
               matrix_of(base + shared_wide[2], Is),           matrix_of(base + shared_wide[3], Is),
               matrix_of(base + shared_wide[4], Is),           matrix_of(base + shared_dx, H)};
    row_weights_ = reinterpret_cast<float*>(base + weights);
    dots_ = reinterpret_cast<float*>(base + dots);
  }

  void execute(const Task& t) override {
    switch (t.kind) {
      case TaskKind::pull: return pull(t);
      case TaskKind::gate_up: return gate_up(t);
      case TaskKind::hidden_grad: return hidden_grad(t);
      case TaskKind::input_grad: return input_grad(t);
      case TaskKind::down_wgrad: return down_wgrad(t);
      case TaskKind::gate_up_wgrad: return gate_up_wgrad(t);
      default: return combine(t);
    }
  }

  const Buffers& buffers(const Task& t) const { return is_shared(t) ? shared_ : routed_; }

  void pull(const Task& t) {
    pull_rows(t, &ArenaLayout::grads_in, routed_.dy.p);
    if (recompute_) pull_rows(t, &ArenaLayout::tokens_in, routed_.x.p);
    const int64_t start = routes_.start[first_expert_ + t.segment];
    for_each_run(t, [&](const SourceRun& run) {
      const int32_t* slots = arena<int32_t>(run.source, layout_.slots) + run.position;
      const float* weights = arena<float>(run.source, layout_.weights);
      for (int64_t i = 0; i < run.rows; ++i) row_weights_[start + run.row + i] = weights[slots[i]];
    });
    finish_tile(t.kind, t.block, 1);
  }

  void gate_up(const Task& t) {
    if (!is_shared(t) && !wait_blocks(TaskKind::pull, t.block, 1, 1)) return;
    const Buffers& b = buffers(t);
    gate_up_tile(t, b.x, {}, b.gate, b.up);
    finish_tile(t.kind, t.block, inter_tiles(t));
  }

  void hidden_grad(const Task& t) {
    if (!is_shared(t) && !wait_blocks(TaskKind::pull, t.block, 1, 1)) return;
    if (recompute_ && !wait_blocks(TaskKind::gate_up, t.block, 1, inter_tiles(t))) return;
    const Rows rows = rows_of(t);
    const int64_t inter = inter_of(t);
    const Columns n = column_tile(t.tile, kTiles.inter_n, inter);
    const Buffers& b = buffers(t);
    float* dhu = scratch_tile(0);
    ops_.gemm(rows.count, n.count, shape_.hidden, b.dy.rows_from(rows.first),
              weight(t, &Weights::down, inter, shape_.hidden).transposed(n.first), dhu, kScratchCols, false);
    float* dots = is_shared(t) ? scratch_tile(1) : dots_ + t.tile * rows_ + rows.first;
    ops_.swiglu_grad(rows.count, n.count, dhu, kScratchCols, is_shared(t) ? nullptr : row_weights_ + rows.first,
                     b.gate.at(rows.first, n.first), b.up.at(rows.first, n.first), b.d_gate.at(rows.first, n.first),
                     b.d_up.at(rows.first, n.first), b.weighted_hidden.at(rows.first, n.first), inter, dots);
    finish_tile(t.kind, t.block, inter_tiles(t));
  }

  // dw of a row = its partial <dhu, h> in tile order.
  void sum_dots(const Task& t) {
    const Rows rows = rows_of(t);
    float* out = arena<float>(rank_, layout_.weight_grads);
    for (int64_t row = rows.first; row < rows.first + rows.count; ++row) {
      float sum = 0.0f;
      for (int32_t tile = 0; tile < inter_tiles(t); ++tile) sum += dots_[tile * rows_ + row];
      out[row] = sum;
    }
  }

  void input_grad(const Task& t) {
    if (!wait_blocks(TaskKind::hidden_grad, t.block, 1, inter_tiles(t))) return;
    const Rows rows = rows_of(t);
    const int64_t inter = inter_of(t);
    const Columns n = column_tile(t.tile, kTiles.hidden_n, shape_.hidden);
    const Buffers& b = buffers(t);
    float* dx = scratch_tile(0);
    for (auto [d, which] : {std::pair{&b.d_gate, &Weights::gate}, std::pair{&b.d_up, &Weights::up}})
      ops_.gemm(rows.count, n.count, inter, d->rows_from(rows.first),
                weight(t, which, shape_.hidden, inter).transposed(n.first), dx, kScratchCols, d == &b.d_up);
    ops_.store(rows.count, n.count, dx, kScratchCols, b.dx.at(rows.first, n.first), shape_.hidden);
    if (!finish_tile(t.kind, t.block, hidden_tiles()) || is_shared(t)) return;
    sum_dots(t);
    flag_homes(t);
  }

  // A tile [m, n] of a weight gradient: contraction over all rows of the segment, in row order, by one owner.
  struct WgradTile {
    int64_t row0, rows;
    Columns m, n;
  };
  bool wgrad_tile(const Task& t, int64_t height, int64_t width, WgradTile* tile) {
    const Segment& s = segments_[size_t(t.segment)];
    if (!wait_blocks(TaskKind::hidden_grad, s.first_block, s.blocks, inter_tiles(t))) return false;
    const int32_t across = int32_t(ceil_div(width, kTiles.wgrad_n));
    *tile = {is_shared(t) ? 0 : routes_.start[first_expert_ + t.segment], s.rows,
             column_tile(t.tile / across, kTiles.wgrad_m, height), column_tile(t.tile % across, kTiles.wgrad_n, width)};
    return true;
  }

  void store_wgrad(const Task& t, void* WeightGrads::*which, const WgradTile& tile, int64_t height, int64_t width,
                   const Matrix& left, const Matrix& right) {
    float* c = scratch_tile(0);
    ops_.gemm(tile.m.count, tile.n.count, tile.rows, left.transposed(tile.row0, tile.m.first),
              right.rows_from(tile.row0, tile.n.first), c, kScratchCols, false);
    const Matrix out = matrix((is_shared(t) ? out_.shared : out_.experts).*which, width, out_.weight_grad_bytes);
    const int64_t first_row = (is_shared(t) ? 0 : t.segment * height) + tile.m.first;
    tile_ops(out.elem_bytes).store(tile.m.count, tile.n.count, c, kScratchCols, out.at(first_row, tile.n.first), width);
  }

  void down_wgrad(const Task& t) {
    WgradTile tile;
    if (!wgrad_tile(t, inter_of(t), shape_.hidden, &tile)) return;
    const Buffers& b = buffers(t);
    store_wgrad(t, &WeightGrads::down, tile, inter_of(t), shape_.hidden, b.weighted_hidden, b.dy);
  }

  void gate_up_wgrad(const Task& t) {
    WgradTile tile;
    if (!wgrad_tile(t, shape_.hidden, inter_of(t), &tile)) return;
    const Buffers& b = buffers(t);
    store_wgrad(t, &WeightGrads::gate, tile, shape_.hidden, inter_of(t), b.x, b.d_gate);
    store_wgrad(t, &WeightGrads::up, tile, shape_.hidden, inter_of(t), b.x, b.d_up);
  }

  // dx_t = shared expert + sum over k, ascending, of its rows; dw_tk from the row's owner
  void combine(const Task& t) {
    const int64_t first = int64_t{t.block} * kTiles.combine_m, last = min_of(first + kTiles.combine_m, shape_.tokens);
    const bool shared = shape_.shared_inter > 0;
    if (shared && !wait_shared_tokens(TaskKind::input_grad, first, last)) return;
    std::vector<float> sum(size_t(shape_.hidden));
    for (int64_t token = first; token < last; ++token) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      if (shared) ops_.add_scaled(shape_.hidden, 1.0f, shared_.dx.at(token), sum.data());
      for (int64_t slot = token * shape_.top_k; slot < (token + 1) * shape_.top_k; ++slot) {
        const Place place = place_of(slot);
        out_.d_router_weights[slot] = 0.0f;
        if (place.row < 0) continue;
        if (!wait_row_block(place.owner, place.row / kTiles.block_m)) return;
        const uint8_t* row = arena<uint8_t>(place.owner, layout_.rows_out) + place.row * row_bytes_;
        ops_.add_scaled(shape_.hidden, 1.0f, row, sum.data());
        out_.d_router_weights[slot] = arena<float>(place.owner, layout_.weight_grads)[place.row];
      }
      ops_.store(1, shape_.hidden, sum.data(), 0, static_cast<uint8_t*>(out_.dx) + token * row_bytes_, 0);
    }
  }

  const SavedBuffers saved_;
  const void* const dy_;
  const BackwardResults out_;
  const bool recompute_;
  int64_t rows_ = 0;           // padded rows in use
  Buffers routed_, shared_;
  float* row_weights_ = nullptr;  // [rows]
  float* dots_ = nullptr;         // [tiles of I, rows]
};

}  // namespace

Status run_backward(Group& group, uint64_t generation, const CallArgs& args, const SavedBuffers& saved, const void* dy,
                    const BackwardResults& out, int workers) {
  return BackwardCall(group, generation, args, saved, dy, out).run(workers);
}

}  // namespace mok::cpu
