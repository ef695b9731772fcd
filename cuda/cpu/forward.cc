// Forward:  x -> arena | pull -> rows -> gate_up -> h -> down -> y rows (arena) | combine -> y
#include <algorithm>
#include <cstring>

#include "layer.h"
#include "segment.h"

namespace mok::cpu {
namespace {

class ForwardCall final : public LayerCall {
 public:
  ForwardCall(Group& group, uint64_t generation, const CallArgs& args, const ForwardResults& out)
      : LayerCall(group, generation, args), out_(out) {}

 private:
  // The buffers of a segment's rows: input, hidden, output, and what is saved of gate and up.
  struct Buffers {
    Matrix x, hidden, y, gate, up;
  };

  void publish() override {
    copy(arena<uint8_t>(rank_, layout_.tokens_in), args_.x, shape_.tokens * row_bytes_);
  }

  void plan(std::vector<Task>* tasks) override {
    allocate();
    write_stats();
    forward_stream(stream_shape(false), [&](const Task& t) { tasks->push_back(t); });
  }

  void allocate() {
    const int64_t rows = int64_t{routed_blocks_} * kTiles.block_m, e = shape_.elem_bytes;
    ScratchPlan plan;
    const int64_t x = plan.add(out_.saved.rows != nullptr ? 0 : rows * row_bytes_);
    const int64_t hidden = plan.add(rows * shape_.inter * e);
    const int64_t shared_hidden = plan.add(shape_.tokens * shape_.shared_inter * e);
    const int64_t shared_y = plan.add(shape_.shared_inter > 0 ? shape_.tokens * row_bytes_ : 0);
    uint8_t* base = plan.reserve(group_.scratch(rank_));
    routed_ = {matrix_of(out_.saved.rows != nullptr ? out_.saved.rows : base + x, shape_.hidden),
               matrix_of(base + hidden, shape_.inter),
               matrix_of(arena<uint8_t>(rank_, layout_.rows_out), shape_.hidden),
               matrix_of(out_.saved.gate, shape_.inter), matrix_of(out_.saved.up, shape_.inter)};
    shared_ = {matrix_of(args_.x, shape_.hidden), matrix_of(base + shared_hidden, shape_.shared_inter),
               matrix_of(base + shared_y, shape_.hidden), matrix_of(out_.saved.shared_gate, shape_.shared_inter),
               matrix_of(out_.saved.shared_up, shape_.shared_inter)};
  }

  void write_stats() {
    for (int32_t e = 0; e < shape_.experts; ++e) out_.tokens_per_expert[e] = int32_t(routes_.rows[e]);
    for (int32_t p = 0; p < shape_.ranks; ++p) out_.rows_per_rank[p] = int32_t(routes_.rank_rows[p]);
    *out_.status = int32_t(Code::ok);
  }

  void execute(const Task& t) override {
    switch (t.kind) {
      case TaskKind::pull:
        pull_rows(t, &ArenaLayout::tokens_in, routed_.x.p);
        finish_tile(t.kind, t.block, 1);
        return;
      case TaskKind::gate_up: return gate_up(t);
      case TaskKind::down: return down(t);
      default: return combine(t);
    }
  }

  const Buffers& buffers(const Task& t) const { return is_shared(t) ? shared_ : routed_; }

  void gate_up(const Task& t) {
    if (!is_shared(t) && !wait_blocks(TaskKind::pull, t.block, 1, 1)) return;
    const Buffers& b = buffers(t);
    gate_up_tile(t, b.x, b.hidden, b.gate, b.up);
    finish_tile(t.kind, t.block, inter_tiles(t));
  }

  void down(const Task& t) {
    if (!wait_blocks(TaskKind::gate_up, t.block, 1, inter_tiles(t))) return;
    const Rows rows = rows_of(t);
    const Columns n = column_tile(t.tile, kTiles.hidden_n, shape_.hidden);
    const Buffers& b = buffers(t);
    float* y = scratch_tile(0);
    ops_.gemm(rows.count, n.count, inter_of(t), b.hidden.rows_from(rows.first),
              weight(t, &Weights::down, inter_of(t), shape_.hidden).rows_from(0, n.first), y, kScratchCols, false);
    ops_.store(rows.count, n.count, y, kScratchCols, b.y.at(rows.first, n.first), shape_.hidden);
    if (finish_tile(t.kind, t.block, hidden_tiles()) && !is_shared(t)) flag_homes(t);
  }

  // y_t = shared expert + sum over k, ascending, of w_tk * y_tk
  void combine(const Task& t) {
    const int64_t first = int64_t{t.block} * kTiles.combine_m, last = min_of(first + kTiles.combine_m, shape_.tokens);
    const bool shared = shape_.shared_inter > 0;
    if (shared && !wait_shared_tokens(TaskKind::down, first, last)) return;
    std::vector<float> sum(size_t(shape_.hidden));
    for (int64_t token = first; token < last; ++token) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      if (shared) ops_.add_scaled(shape_.hidden, 1.0f, shared_.y.at(token), sum.data());
      for (int64_t slot = token * shape_.top_k; slot < (token + 1) * shape_.top_k; ++slot) {
        const Place place = place_of(slot);
        if (place.row < 0) continue;
        if (!wait_row_block(place.owner, place.row / kTiles.block_m)) return;
        const uint8_t* row = arena<uint8_t>(place.owner, layout_.rows_out) + place.row * row_bytes_;
        ops_.add_scaled(shape_.hidden, args_.router_weights[slot], row, sum.data());
      }
      ops_.store(1, shape_.hidden, sum.data(), 0, static_cast<uint8_t*>(out_.y) + token * row_bytes_, 0);
    }
  }

  const ForwardResults out_;
  Buffers routed_, shared_;
};

}  // namespace

Status run_forward(Group& group, uint64_t generation, const CallArgs& args, const ForwardResults& out, int workers) {
  return ForwardCall(group, generation, args, out).run(workers);
}

}  // namespace mok::cpu
