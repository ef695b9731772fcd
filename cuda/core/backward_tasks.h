// The tasks of the backward pass in the order in which clusters take them: arithmetic on the counts, no table.
//
//   rows      groups of 8 pairs of row blocks; step s does gate_up of group s, hidden_grad of group s - 1 and input_grad
//             of group s - 2, so that what a task reads was dealt a whole group earlier
//   weights   experts, the longest first: dW_d, dW_g, dW_u
//
// Within a group and a kind: column tiles outer, pairs inner, so that a weight tile serves the group while it is in L2.
// Weight gradients go in panels of 8 tiles of I by all of H: 66 clusters at work then read about 8 + 8 tiles' operands.
#pragma once

#include "types.h"

namespace mok {

enum class BackwardKind : int32_t { gate_up, hidden_grad, input_grad, down_wgrad, gate_wgrad, up_wgrad };

struct BackwardTask {
  BackwardKind kind;
  bool shared;   // of the shared expert
  int32_t of;    // pair of row blocks, or place of the expert in the order of length
  int32_t m, n;  // tile of a weight gradient; else n alone, the column tile
};

MOK_HD bool is_wgrad(BackwardKind kind) { return kind >= BackwardKind::down_wgrad; }

// The tasks of the routed experts, or of the shared one.
struct BackwardOrder {
  static constexpr int32_t kGroup = 8, kRowKinds = 3;
  int32_t tiles[kRowKinds];          // column tiles of gate_up (0 = g and u were saved), hidden_grad, input_grad
  int32_t inter_tiles, hidden_tiles;  // of a weight gradient
  int32_t pairs, experts;
  bool shared;

  MOK_HD int32_t row_tasks() const { return pairs * (tiles[0] + tiles[1] + tiles[2]); }
  MOK_HD int32_t weight_tasks() const { return 3 * experts * inter_tiles * hidden_tiles; }
  MOK_HD BackwardTask row_task(int32_t i) const {
    int32_t step = i / (kGroup * (tiles[0] + tiles[1] + tiles[2]));  // no later than the step sought
    while (tasks_before(step + 1) <= i) ++step;
    i -= tasks_before(step);
    int32_t kind = 0, first = 0, members = 0;
    for (; kind < kRowKinds; ++kind) {
      first = pairs_before(step - kind);
      members = pairs_before(step - kind + 1) - first;
      if (i < members * tiles[kind]) break;
      i -= members * tiles[kind];
    }
    return {BackwardKind(kind), shared, first + i % members, 0, i / members};
  }

  MOK_HD BackwardTask weight_task(int32_t i) const {
    const int32_t tiles_each = inter_tiles * hidden_tiles, place = i / (3 * tiles_each);
    const BackwardKind kind = BackwardKind(int32_t(BackwardKind::down_wgrad) + i / tiles_each % 3);
    i %= tiles_each;
    const int32_t panel = i / (kGroup * hidden_tiles) * kGroup, width = int32_t(min_of(kGroup, inter_tiles - panel));
    i -= panel * hidden_tiles;
    const int32_t inter = panel + i % width, hidden = i / width;
    if (kind == BackwardKind::down_wgrad) return {kind, shared, place, inter, hidden};
    return {kind, shared, place, hidden, inter};
  }

 private:
  MOK_HD int32_t pairs_before(int32_t group) const {
    return group < 0 ? 0 : int32_t(min_of(int64_t{group} * kGroup, pairs));
  }
  MOK_HD int32_t tasks_before(int32_t step) const {
    return tiles[0] * pairs_before(step) + tiles[1] * pairs_before(step - 1) + tiles[2] * pairs_before(step - 2);
  }
};

// The whole pass: the shared expert's rows first, since they wait for nobody; its weights before the others, too.
struct BackwardTasks {
  BackwardOrder shared, routed;

  MOK_HD int32_t count() const {
    return shared.row_tasks() + routed.row_tasks() + shared.weight_tasks() + routed.weight_tasks();
  }
  MOK_HD BackwardTask task(int32_t i) const {
    if (i < shared.row_tasks()) return shared.row_task(i);
    i -= shared.row_tasks();
    if (i < routed.row_tasks()) return routed.row_task(i);
    i -= routed.row_tasks();
    if (i < shared.weight_tasks()) return shared.weight_task(i);
    return routed.weight_task(i - shared.weight_tasks());
  }
};

}  // namespace mok
