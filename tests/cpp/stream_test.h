// The task streams. Part of cpu_test.cc.
#pragma once

#include <algorithm>
#include <tuple>

#include "../../cuda/core/backward_tasks.h"
#include "../../cuda/core/pairs.h"
#include "../../cuda/device/params.h"
#include "check.h"

namespace mok::cpu {
namespace {

// ---- task stream ----

// A stream with the place of every task. Fails when a task comes twice.
struct Stream {
  using Key = std::tuple<TaskKind, int32_t, int32_t, int32_t>;
  std::map<Key, size_t> at;
  std::vector<Task> tasks;

  void add(const Task& t) {
    CHECK(at.emplace(Key{t.kind, t.segment, t.block, t.tile}, tasks.size()).second, "every tile once");
    tasks.push_back(t);
  }
  size_t place(TaskKind kind, int32_t segment, int32_t block, int32_t tile) const {
    const auto it = at.find(Key{kind, segment, block, tile});
    CHECK(it != at.end(), "task of kind " + num(int64_t(kind)) + " is in the stream");
    return it->second;
  }
};

// The tiles [0, n) of `kind` are all there, after `after`. Returns the last one's place.
size_t check_tiles(const Stream& stream, TaskKind kind, int32_t segment, int32_t block, int64_t n, size_t after,
                   size_t* count) {
  size_t last = after;
  for (int32_t tile = 0; tile < n; ++tile) {
    const size_t here = stream.place(kind, segment, block, tile);
    CHECK(after == size_t(-1) || here > after, "a task waits only on earlier tasks");
    if (last == size_t(-1) || here > last) last = here;
    ++*count;
  }
  return last;
}

struct StreamCase {
  std::vector<Segment> segments;
  std::vector<int32_t> order;
  StreamShape shape;
};

void fill_random_stream(Random& rnd, StreamCase* c) {
  const int32_t local = int32_t(rnd.in(1, 6));
  const Shape shape{1, local, 2, 4, rnd.in(0, 50), rnd.in(1, 60), rnd.in(1, 40), rnd.in(0, 1) * rnd.in(1, 30), 0};
  const Tiles tiles{int32_t(rnd.in(1, 9)), int32_t(rnd.in(1, 16)), int32_t(rnd.in(1, 16)), int32_t(rnd.in(1, 16)),
                    int32_t(rnd.in(1, 16)), int32_t(rnd.in(1, 8)), int32_t(rnd.in(0, 3))};
  int32_t block = 0;
  for (int32_t s = 0; s < local + (shape.shared_inter > 0); ++s) {
    const int64_t rows = s == local ? shape.tokens : rnd.in(0, 2) == 0 ? 0 : rnd.in(1, 40);
    const int32_t blocks = int32_t(ceil_div(rows, tiles.block_m));
    c->segments.push_back({rows, block, blocks, s == local ? shape.shared_inter : shape.inter});
    block += blocks;
  }
  c->order.resize(c->segments.size(), -7);
  order_by_length(c->segments.data(), int32_t(c->segments.size()), c->order.data());
  c->shape = {shape, tiles, c->segments.data(), c->order.data(), rnd.in(0, 1) == 1};
}

void check_order_by_length(const StreamCase& c) {
  std::vector<bool> seen(c.segments.size());
  for (size_t i = 0; i < c.order.size(); ++i) {
    seen[size_t(c.order[i])] = true;
    CHECK(i == 0 || c.segments[size_t(c.order[i - 1])].rows >= c.segments[size_t(c.order[i])].rows, "long ones first");
  }
  for (bool s : seen) CHECK(s, "every segment has a place");
}

// The second GEMM of the n-th routed block comes once min(n + lag + 1, all) blocks have had their first.
void check_lag(const Stream& stream, const StreamCase& c, TaskKind first, TaskKind second) {
  int64_t blocks = 0, ahead = 0;
  for (int32_t s = 0; s < c.shape.shape.local_experts(); ++s) blocks += c.segments[size_t(s)].blocks;
  for (const Task& t : stream.tasks) {
    if (t.segment == c.shape.shape.local_experts() || t.tile != 0) continue;
    if (t.kind == first) ++ahead;
    if (t.kind == second) {
      const int64_t nth = t.block - c.segments[0].first_block;
      CHECK(ahead == min_of(nth + c.shape.tiles.lag + 1, blocks), "lag of block " + num(nth));
    }
  }
}

void check_stream(const StreamCase& c, bool backward) {
  Stream stream;
  auto emit = [&](const Task& t) { stream.add(t); };
  if (backward) backward_stream(c.shape, emit); else forward_stream(c.shape, emit);
  const StreamShape& s = c.shape;
  const int32_t local = s.shape.local_experts();
  const int64_t hidden = s.shape.hidden;
  const auto up = [&](int64_t total, int64_t tile) { return ceil_div(total, tile); };
  const size_t start = size_t(-1);
  size_t count = 0, end = start;
  for (int32_t seg = 0; seg < s.segment_count(); ++seg) {
    const Segment& segment = c.segments[size_t(seg)];
    const int64_t inter_tiles = up(segment.inter, s.tiles.inter_n), hidden_tiles = up(hidden, s.tiles.hidden_n);
    size_t grads = start;
    for (int32_t b = segment.first_block; b < segment.first_block + segment.blocks; ++b) {
      size_t at = start;
      if (seg < local) at = check_tiles(stream, TaskKind::pull, seg, b, 1, at, &count);
      if (!backward || s.recompute) at = check_tiles(stream, TaskKind::gate_up, seg, b, inter_tiles, at, &count);
      if (backward) at = check_tiles(stream, TaskKind::hidden_grad, seg, b, inter_tiles, at, &count);
      if (grads == start || at > grads) grads = at;
      at = check_tiles(stream, backward ? TaskKind::input_grad : TaskKind::down, seg, b, hidden_tiles, at, &count);
      if (end == start || at > end) end = at;
    }
    if (!backward) continue;
    const int64_t m = s.tiles.wgrad_m, n = s.tiles.wgrad_n;
    for (auto [kind, tiles] : {std::pair{TaskKind::down_wgrad, up(segment.inter, m) * up(hidden, n)},
                               std::pair{TaskKind::gate_up_wgrad, up(hidden, m) * up(segment.inter, n)}}) {
      const size_t at = check_tiles(stream, kind, seg, 0, tiles, grads, &count);
      if (end == start || at > end) end = at;
    }
  }
  for (int32_t i = 0; i < up(s.shape.tokens, s.tiles.combine_m); ++i)
    check_tiles(stream, TaskKind::combine, 0, i, 1, end, &count);
  CHECK(count == stream.tasks.size(), "nothing else is in the stream");
  check_lag(stream, c, backward ? TaskKind::hidden_grad : TaskKind::gate_up,
            backward ? TaskKind::input_grad : TaskKind::down);
}

void test_task_stream() {
  Random rnd(3);
  for (int trial = 0; trial < 300; ++trial) {
    StreamCase c;
    fill_random_stream(rnd, &c);
    check_order_by_length(c);
    check_stream(c, false);
    check_stream(c, true);
  }
}

// ---- pairs of row blocks: the stream of the GPU kernels ----

struct PairCase {
  std::vector<int32_t> blocks, pair{0}, group{0}, split{0};
  PairStream stream;

  explicit PairCase(Random& rnd) {
    const int32_t experts = int32_t(rnd.in(1, 9));
    for (int32_t e = 0; e < experts; ++e) {
      blocks.push_back(int32_t(rnd.in(0, 2) == 0 ? 0 : rnd.in(1, 45)));
      pair.push_back(pair.back() + pairs_of(blocks.back()));
      group.push_back(group.back() + groups_of(blocks.back()));
      split.push_back(split.back() + splits_of(blocks.back()));
    }
    const PairSegments segments{pair.data(), group.data(), split.data(), experts};
    stream = {segments, int32_t(rnd.in(1, 17)), int32_t(rnd.in(1, 29)), 0};
    stream.lag = rnd.in(0, 1) ? int32_t(rnd.in(0, 4)) : lag_for(segments, stream.first_tiles, 128);
  }
  bool is_split(int32_t p) const {
    const int32_t e = holder(pair.data(), int32_t(blocks.size()), p);
    return blocks[size_t(e)] % 2 == 1 && p == pair[size_t(e) + 1] - 1;
  }
};

// Where the tasks of one kind stand in the stream, by (pair, tile).
using PairPlaces = std::map<std::pair<int32_t, int32_t>, int32_t>;

void place_pairs(const PairCase& c, int32_t g, int32_t offset, int32_t tiles, std::vector<int>* used, PairPlaces* at) {
  const PairGroup group = pair_group(c.stream.segments, g);
  CHECK(group.pairs <= kGroupPairs, "a group is no longer than that");
  CHECK(group.first_pair >= c.pair[size_t(group.expert)] &&
            group.first_pair + group.pairs <= c.pair[size_t(group.expert) + 1], "a group has one expert");
  for (int32_t i = 0; i < tasks_of_group(group, tiles); ++i) {
    const PairTile t = pair_tile(group, tiles, i);
    CHECK(offset + i >= 0 && offset + i < c.stream.count(), "in the stream");
    CHECK((*used)[size_t(offset + i)]++ == 0, "one task a place");
    CHECK(at->emplace(std::pair{t.pair, t.tile}, offset + i).second, "every tile once");
  }
}

// Every pair has its place; with as many rows from each rank, no two ranks read from the same one at a time.
void test_ranks_read_in_turns() {
  for (int32_t blocks = 0; blocks < 40; ++blocks)
    for (int32_t before = 0; before < 30; ++before) {
      std::vector<bool> seen(size_t(pairs_of(blocks)));
      for (int32_t i = 0; i < pairs_of(blocks); ++i) seen.at(size_t(place_of_pair(i, blocks, before))) = true;
      for (bool s : seen) CHECK(s, "every pair has its place");
      if (splits_of(blocks)) CHECK(place_of_pair(blocks / 2, blocks, before) == blocks / 2, "a split pair stays the last");
    }
  const int32_t ranks = 8, each = 4;  // pairs
  for (int32_t i = 0; i < ranks * each; ++i) {
    std::vector<int> readers(ranks);
    for (int32_t r = 0; r < ranks; ++r) ++readers[size_t(place_of_pair(i, 2 * ranks * each, r * each) / each)];
    for (int n : readers) CHECK(n == 1, "one reader a rank");
    CHECK(i >= each || place_of_pair(i, 2 * ranks * each, 3 * each) / each == 3, "own rows first");
  }
  for (int32_t rank = 0; rank < ranks; ++rank)
    for (int32_t i = 0; i < ranks * each; ++i) {  // experts a rank: `each`
      const int32_t e = back_expert(i, rank, ranks, each), owner = e / each;
      CHECK(back_index(e, rank, ranks, each) == i, "there and back");
      // the owner, which begins with its own rows, comes to this rank's as many ranks later
      CHECK(i % ranks == (rank - owner + ranks) % ranks, "results are fetched in the order in which owners finish them");
    }
}

void test_pair_stream() {
  Random rnd(5);
  for (int trial = 0; trial < 300; ++trial) {
    const PairCase c(rnd);
    std::vector<int> used(size_t(c.stream.count()), 0);
    PairPlaces first, second;
    for (int32_t g = 0; g < c.stream.segments.groups(); ++g) {
      place_pairs(c, g, c.stream.first_offset(g), c.stream.first_tiles, &used, &first);
      place_pairs(c, g, c.stream.second_offset(g), c.stream.second_tiles, &used, &second);
    }
    CHECK(first.size() + second.size() == used.size(), "no place is left empty");
    for (int32_t p = 0; p < c.stream.segments.pairs(); ++p) {
      int32_t last = -1;
      for (int32_t t = 0; t < tasks_of_pair(c.stream.first_tiles, c.is_split(p)); ++t) {
        CHECK(first.count({p, t}) == 1, "all tiles of the first GEMM");
        last = std::max(last, first[{p, t}]);
      }
      for (int32_t t = 0; t < tasks_of_pair(c.stream.second_tiles, c.is_split(p)); ++t) {
        CHECK(second.count({p, t}) == 1, "all tiles of the second GEMM");
        CHECK((second[{p, t}] > last), "a task waits only on earlier tasks");
      }
    }
  }
}

// ---- the backward pass of the GPU kernels ----

BackwardOrder random_order(Random& rnd, bool shared) {
  const int32_t inter = int32_t(rnd.in(1, 12)), hidden = int32_t(rnd.in(1, 29));
  const int32_t gate_up = rnd.in(0, 1) ? 0 : int32_t(rnd.in(1, 17)), pairs = int32_t(rnd.in(0, 70));
  return {{gate_up, inter, hidden}, inter, hidden, pairs, int32_t(rnd.in(shared ? 0 : 1, shared ? 1 : 9)), shared};
}

void check_backward_order(const BackwardTasks& tasks, const BackwardOrder& order) {
  using Tile = std::tuple<int32_t, int32_t, int32_t, int32_t>;  // kind, pair or expert, m, n
  std::map<Tile, int32_t> at;
  for (int32_t i = 0; i < tasks.count(); ++i) {
    const BackwardTask t = tasks.task(i);
    if (t.shared != order.shared) continue;
    CHECK(at.emplace(Tile{int32_t(t.kind), t.of, t.m, t.n}, i).second, "every tile once");
  }
  CHECK(int32_t(at.size()) == order.row_tasks() + order.weight_tasks(), "as many as are counted");
  int32_t last_row = -1;
  for (int32_t pair = 0; pair < order.pairs; ++pair) {
    int32_t before = -1;
    for (int32_t kind = 0; kind < BackwardOrder::kRowKinds; ++kind) {
      int32_t last = before;
      for (int32_t n = 0; n < order.tiles[kind]; ++n) {
        CHECK((at.count({kind, pair, 0, n}) == 1), "all column tiles");
        CHECK((at[{kind, pair, 0, n}] > before), "a task waits only on earlier tasks");
        last = std::max(last, at[{kind, pair, 0, n}]);
      }
      before = last;
    }
    last_row = std::max(last_row, before);
  }
  for (int32_t e = 0; e < order.experts; ++e)
    for (int32_t i = 0; i < order.inter_tiles; ++i)
      for (int32_t h = 0; h < order.hidden_tiles; ++h)
        for (auto [kind, m, n] : {std::tuple{BackwardKind::down_wgrad, i, h}, std::tuple{BackwardKind::gate_wgrad, h, i},
                                  std::tuple{BackwardKind::up_wgrad, h, i}}) {
          CHECK((at.count({int32_t(kind), e, m, n}) == 1), "all tiles of a weight gradient");
          CHECK((at[{int32_t(kind), e, m, n}] > last_row), "after the rows");
        }
}

void test_backward_tasks() {
  Random rnd(7);
  for (int trial = 0; trial < 200; ++trial) {
    const BackwardTasks tasks{random_order(rnd, true), random_order(rnd, false)};
    check_backward_order(tasks, tasks.shared);
    check_backward_order(tasks, tasks.routed);
  }
}

}  // namespace
}  // namespace mok::cpu
