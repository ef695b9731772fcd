// The task stream: what a call does, in the order in which workers (CTAs, threads) take it. A pure function of the
// counts. Tasks come off one in-order ticket and wait only on earlier tasks or on a peer's flag, so any number of
// workers >= 1 makes progress; combine tasks, the only ones that wait for a peer's results, come last.
//
//   forward   shared expert | pull b, gate_up b, down b-lag ... | combine
//   backward  shared expert | pull b, [gate_up b], hidden_grad b, input_grad b-lag ... | weight_grad | combine
#pragma once

#include "routing.h"

namespace mok {

enum class TaskKind : int32_t {
  pull,              // routed rows of a block, from their homes
  gate_up,           // g, u = x W_g, x W_u; h = silu(g) * u
  down,              // y = h W_d
  hidden_grad,       // dh = dY W_d^T; d_g, d_u, w * h, <dh, h>
  input_grad,        // dX = [d_g | d_u] [W_g | W_u]^T
  gate_up_wgrad,     // dW_g, dW_u = X^T d_g, X^T d_u
  down_wgrad,        // dW_d = (w h)^T dY
  combine,           // sums a token's K rows at home
};

// segment: local expert, or local_experts() for the shared one. block: row block of the routed buffer; the shared
// expert's token blocks follow the routed ones. tile: column tile, or tile of a weight gradient in row-major order.
struct Task {
  TaskKind kind;
  int32_t segment;
  int32_t block;
  int32_t tile;
};

// One segment as the stream sees it: a contiguous, padded range of row blocks.
struct Segment {
  int64_t rows;
  int32_t first_block;
  int32_t blocks;
  int64_t inter;
};

struct StreamShape {
  Shape shape;
  Tiles tiles;
  const Segment* segments;   // [local_experts() (+ 1 with a shared expert)]
  const int32_t* by_length;  // segments in weight-gradient order: long ones first
  bool recompute;            // backward: gate and up were not saved

  MOK_HD int32_t segment_count() const { return shape.local_experts() + (shape.shared_inter > 0); }
  MOK_HD int32_t gate_up_tiles(int32_t s) const { return int32_t(ceil_div(segments[s].inter, tiles.inter_n)); }
  MOK_HD int32_t hidden_tiles() const { return int32_t(ceil_div(shape.hidden, tiles.hidden_n)); }
  MOK_HD int32_t combine_tasks() const { return int32_t(ceil_div(shape.tokens, tiles.combine_m)); }
};

MOK_HD void order_by_length(const Segment* segments, int32_t n, int32_t* order) {
  for (int32_t i = 0; i < n; ++i) {
    int32_t j = i;
    for (; j > 0 && segments[order[j - 1]].rows < segments[i].rows; --j) order[j] = order[j - 1];
    order[j] = i;
  }
}

template <class Emit>
MOK_HD void emit_tiles(TaskKind kind, int32_t segment, int32_t block, int32_t tiles, Emit& emit) {
  for (int32_t n = 0; n < tiles; ++n) emit(Task{kind, segment, block, n});
}

// Walks the row blocks of all routed segments in order; `second` trails `first` by tiles.lag blocks.
template <class First, class Second>
MOK_HD void lagged_blocks(const StreamShape& s, First first, Second second) {
  int32_t seg2 = 0, block2 = 0, ahead = 0;
  auto advance = [&] {
    while (block2 == s.segments[seg2].blocks) { ++seg2; block2 = 0; }
    second(seg2, s.segments[seg2].first_block + block2);
    ++block2;
    --ahead;
  };
  for (int32_t seg = 0; seg < s.shape.local_experts(); ++seg)
    for (int32_t b = 0; b < s.segments[seg].blocks; ++b) {
      first(seg, s.segments[seg].first_block + b);
      if (++ahead > s.tiles.lag) advance();
    }
  while (ahead > 0) advance();
}

template <class Emit>
MOK_HD void forward_stream(const StreamShape& s, Emit emit) {
  auto first = [&](int32_t seg, int32_t b) {
    if (seg < s.shape.local_experts()) emit(Task{TaskKind::pull, seg, b, 0});
    emit_tiles(TaskKind::gate_up, seg, b, s.gate_up_tiles(seg), emit);
  };
  auto second = [&](int32_t seg, int32_t b) { emit_tiles(TaskKind::down, seg, b, s.hidden_tiles(), emit); };
  for (int32_t seg = s.shape.local_experts(); seg < s.segment_count(); ++seg)
    for (int32_t b = 0; b < s.segments[seg].blocks; ++b) {
      first(seg, s.segments[seg].first_block + b);
      second(seg, s.segments[seg].first_block + b);
    }
  lagged_blocks(s, first, second);
  for (int32_t i = 0; i < s.combine_tasks(); ++i) emit(Task{TaskKind::combine, 0, i, 0});
}

template <class Emit>
MOK_HD void backward_stream(const StreamShape& s, Emit emit) {
  auto first = [&](int32_t seg, int32_t b) {
    if (seg < s.shape.local_experts()) emit(Task{TaskKind::pull, seg, b, 0});
    if (s.recompute) emit_tiles(TaskKind::gate_up, seg, b, s.gate_up_tiles(seg), emit);
    emit_tiles(TaskKind::hidden_grad, seg, b, s.gate_up_tiles(seg), emit);
  };
  auto second = [&](int32_t seg, int32_t b) { emit_tiles(TaskKind::input_grad, seg, b, s.hidden_tiles(), emit); };
  for (int32_t seg = s.shape.local_experts(); seg < s.segment_count(); ++seg)
    for (int32_t b = 0; b < s.segments[seg].blocks; ++b) {
      first(seg, s.segments[seg].first_block + b);
      second(seg, s.segments[seg].first_block + b);
    }
  lagged_blocks(s, first, second);
  for (int32_t i = 0; i < s.segment_count(); ++i) {
    const int32_t seg = s.by_length[i];
    const int64_t inter = s.segments[seg].inter, hidden = s.shape.hidden;
    emit_tiles(TaskKind::down_wgrad, seg, 0,
               int32_t(ceil_div(inter, s.tiles.wgrad_m) * ceil_div(hidden, s.tiles.wgrad_n)), emit);
    emit_tiles(TaskKind::gate_up_wgrad, seg, 0,
               int32_t(ceil_div(hidden, s.tiles.wgrad_m) * ceil_div(inter, s.tiles.wgrad_n)), emit);
  }
  for (int32_t i = 0; i < s.combine_tasks(); ++i) emit(Task{TaskKind::combine, 0, i, 0});
}

}  // namespace mok
