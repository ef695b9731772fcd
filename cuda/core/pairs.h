// The task stream of kernels that work on pairs of row blocks: a cluster of two thread blocks takes a pair, each one row
// block. An odd last block of an expert is a *split* pair: both work on the same rows, on neighbouring column tiles, so
// a task covers two of them.
//
//   group     up to kGroupPairs pairs of one expert: a weight tile serves them all while it is in L2
//   stream    first GEMM of group g, then second GEMM of group g - lag
//
// Everything is found by number, without a walk over what comes before, so that many threads can write the stream.
#pragma once

#include "types.h"

namespace mok {

constexpr int32_t kGroupPairs = 8;

// Exclusive prefix sums over the experts of a rank, [experts + 1] each.
struct PairSegments {
  const int32_t *first_pair, *first_group, *first_split;
  int32_t experts;

  MOK_HD int32_t pairs() const { return first_pair[experts]; }
  MOK_HD int32_t groups() const { return first_group[experts]; }
};

MOK_HD constexpr int32_t pairs_of(int32_t blocks) { return (blocks + 1) / 2; }
MOK_HD constexpr int32_t groups_of(int32_t blocks) { return (pairs_of(blocks) + kGroupPairs - 1) / kGroupPairs; }
MOK_HD constexpr int32_t splits_of(int32_t blocks) { return blocks % 2; }

// Where pair i of an expert stands in its segment, in pairs. A rank works on the rows of its own tokens first (`before`:
// pairs in front of them), then on those of the next ranks around, so that at any time ranks read from different peers
// and answer different ones. A split pair stays the last.
MOK_HD int32_t place_of_pair(int32_t i, int32_t blocks, int32_t before) {
  const int32_t whole = blocks / 2;
  return i < whole ? (i + before) % whole : i;
}

// The member of ascending `first` [n + 1] that holds `value`: the last i with first[i] <= value < first[n].
MOK_HD int32_t holder(const int32_t* first, int32_t n, int32_t value) {
  int32_t lo = 0, hi = n;
  while (hi - lo > 1) {
    const int32_t mid = (lo + hi) / 2;
    (first[mid] <= value ? lo : hi) = mid;
  }
  return lo;
}

struct PairGroup {
  int32_t expert;
  int32_t first_pair;
  int32_t pairs;
  bool split;             // the last of its pairs
  int32_t splits_before;  // in the groups before
};

// Group g; for g past the last one, what stands before it: all pairs.
MOK_HD PairGroup pair_group(const PairSegments& s, int32_t g) {
  if (g >= s.groups()) return {s.experts, s.pairs(), 0, false, s.first_split[s.experts]};
  const int32_t e = holder(s.first_group, s.experts, g);
  const int32_t first = s.first_pair[e] + (g - s.first_group[e]) * kGroupPairs, end = s.first_pair[e + 1];
  const int32_t pairs = int32_t(min_of(kGroupPairs, end - first));
  const bool split = first + pairs == end && s.first_split[e + 1] > s.first_split[e];
  return {e, first, pairs, split, s.first_split[e]};
}

// A split pair takes half the tasks.
MOK_HD constexpr int32_t tasks_of_pair(int32_t tiles, bool split) { return split ? (tiles + 1) / 2 : tiles; }
MOK_HD int32_t tasks_before(const PairGroup& g, int32_t tiles) {
  return g.first_pair * tiles - g.splits_before * (tiles / 2);
}
MOK_HD int32_t tasks_of_group(const PairGroup& g, int32_t tiles) {
  return g.pairs * tiles - (g.split ? tiles / 2 : 0);
}

// Task i of a group: column tiles outer, pairs inner.
struct PairTile {
  int32_t pair, tile;
};
MOK_HD PairTile pair_tile(const PairGroup& g, int32_t tiles, int32_t i) {
  const int32_t together = g.pairs * tasks_of_pair(tiles, g.split);  // as long as the split pair takes part
  if (i < together) return {g.first_pair + i % g.pairs, i / g.pairs};
  const int32_t others = g.pairs - 1, j = i - together;
  return {g.first_pair + j % others, together / g.pairs + j / others};
}

struct PairStream {
  PairSegments segments;
  int32_t first_tiles, second_tiles;  // column tiles of the two GEMMs
  int32_t lag;                        // groups

  MOK_HD int32_t count() const {
    const PairGroup end = pair_group(segments, segments.groups());
    return tasks_before(end, first_tiles) + tasks_before(end, second_tiles);
  }
  MOK_HD int32_t first_offset(int32_t g) const {
    return tasks_before(pair_group(segments, g), first_tiles) +
           tasks_before(pair_group(segments, g > lag ? g - lag : 0), second_tiles);
  }
  MOK_HD int32_t second_offset(int32_t g) const {
    return tasks_before(pair_group(segments, int32_t(min_of(g + lag + 1, segments.groups()))), first_tiles) +
           tasks_before(pair_group(segments, g), second_tiles);
  }
};

// Groups between the two GEMMs of a pair such that about `tasks` others are dealt in between: a task should not have to
// wait for one that is still being worked on.
MOK_HD int32_t lag_for(const PairSegments& s, int32_t first_tiles, int32_t tasks) {
  const int32_t all = tasks_before(pair_group(s, s.groups()), first_tiles);
  return all == 0 ? 1 : int32_t(ceil_div(int64_t{tasks} * s.groups(), all));
}

}  // namespace mok
