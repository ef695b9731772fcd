// Routing, arena layout and protocol words. Part of cpu_test.cc.
#pragma once

#include "check.h"

namespace mok::cpu {
namespace {

// ---- routing ----

// Routes of a whole group, and the segment order by definition.
struct Routed {
  Shape shape;
  std::vector<std::vector<int32_t>> ids;       // [P][T * K]
  std::vector<std::vector<int32_t>> sorted;    // [P][used slots]
  std::vector<int32_t> counts;                 // [P, E]
  using Row = std::pair<int32_t, int32_t>;     // source rank, slot
  std::vector<std::vector<Row>> segments;      // [E], rows in global (token, k) order
};

Routed random_routing(Random& rnd) {
  Routed r;
  const int32_t ranks = int32_t(rnd.in(1, 6)), local = int32_t(rnd.in(1, 5)), experts = ranks * local;
  const int64_t tokens = rnd.in(0, 40);
  const int32_t top_k = int32_t(rnd.in(1, 4));
  r.shape = {ranks, experts, top_k, 4, tokens, 8, 8, 0, 0};
  r.segments.resize(size_t(experts));
  const int64_t popular = rnd.in(0, experts);  // experts from here on stay empty
  for (int32_t p = 0; p < ranks; ++p) {
    std::vector<int32_t> ids, counts(size_t(experts), -7), cursor(size_t(experts), -7);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      const int32_t e = int32_t(rnd.in(-1, popular - 1));
      ids.push_back(e);
      if (e >= 0) r.segments[size_t(e)].push_back({p, int32_t(i)});
    }
    CHECK(count_slots(ids.data(), tokens * top_k, experts, counts.data()) == -1, "legal ids");
    std::vector<int32_t> sorted(size_t(tokens * top_k), -7);
    sort_slots(ids.data(), tokens * top_k, experts, counts.data(), cursor.data(), sorted.data());
    r.counts.insert(r.counts.end(), counts.begin(), counts.end());
    r.ids.push_back(ids);
    r.sorted.push_back(sorted);
  }
  return r;
}

// build_routes into storage of its own.
struct RouteTables {
  std::vector<int64_t> rows, start, before, list, rank_rows, rank_end;
  Routes view;
  RouteTables(const Routed& r, int32_t block_m, int32_t me)
      : rows(size_t(r.shape.experts)), start(rows), before(rows), list(rows), rank_rows(size_t(r.shape.ranks)),
        rank_end(rank_rows), view{rows.data(), start.data(), before.data(), list.data(), rank_rows.data(), rank_end.data()} {
    build_routes(r.counts.data(), r.shape, block_m, me, view);
  }
};

int64_t list_start(const Routed& r, int32_t source, int32_t expert) {
  int64_t at = 0;
  for (int32_t e = 0; e < expert; ++e) at += r.counts[size_t(source) * size_t(r.shape.experts) + size_t(e)];
  return at;
}

// Pulling any window of a segment yields its rows in global (token, k) order, each once.
void check_segment_windows(const Routed& r, int32_t e, Random& rnd) {
  const auto& truth = r.segments[size_t(e)];
  const int64_t rows = int64_t(truth.size());
  for (int trial = 0; trial < 4; ++trial) {
    const int64_t first = trial == 0 ? 0 : rnd.in(0, rows), last = trial == 0 ? rows : rnd.in(first, rows);
    int64_t at = first;
    for_each_source(r.counts.data(), r.shape, e, first, last, [&](int32_t src) { return list_start(r, src, e); },
                    [&](const SourceRun& run) {
                      CHECK(run.row == at && run.rows > 0, "runs follow each other");
                      for (int64_t i = 0; i < run.rows; ++i, ++at) {
                        const int32_t slot = r.sorted[size_t(run.source)][size_t(run.position + i)];
                        CHECK((Routed::Row{run.source, slot} == truth[size_t(at)]), "global (token, k) order");
                      }
                    });
    CHECK(at == last, "window covered");
  }
}

// What a home derives for its own slots is where the owner puts them.
void check_way_back(const Routed& r, const RouteTables& t, int32_t me) {
  for (int32_t e = 0; e < r.shape.experts; ++e) {
    const auto& truth = r.segments[size_t(e)];
    CHECK(t.rows[size_t(e)] == int64_t(truth.size()), "rows of a segment");
    CHECK(t.list[size_t(e)] == list_start(r, me, e), "start in my list");
    int64_t mine = 0;
    for (size_t row = 0; row < truth.size(); ++row) {
      if (truth[row].first != me) continue;
      CHECK(t.before[size_t(e)] + mine == int64_t(row), "my rows are one range");
      CHECK(r.sorted[size_t(me)][size_t(t.list[size_t(e)] + mine)] == truth[row].second, "in my list's order");
      ++mine;
    }
  }
}

void check_layout_of_segments(const Routed& r, const RouteTables& t, const Tiles& tiles) {
  const int32_t local = r.shape.local_experts();
  Shape shape = r.shape;
  for (int32_t p = 0; p < shape.ranks; ++p) {
    int64_t end = 0, rows = 0;
    for (int32_t e = p * local; e < (p + 1) * local; ++e) {
      CHECK(t.start[size_t(e)] == end && end % tiles.block_m == 0, "segments start on a block, without gaps");
      end = align_up(end + t.rows[size_t(e)], tiles.block_m);
      rows += t.rows[size_t(e)];
    }
    CHECK(t.rank_rows[size_t(p)] == rows && t.rank_end[size_t(p)] == end, "rows of a rank");
    shape.max_rows = rows;
    CHECK(end <= padded_rows(shape, tiles), "padded_rows is room enough");
  }
}

void check_capacity(const Routed& r, const RouteTables& t, Random& rnd) {
  Shape shape = r.shape;
  shape.max_rows = rnd.in(0, shape.slots() * shape.ranks);
  int32_t first_over = -1;
  for (int32_t p = shape.ranks - 1; p >= 0; --p)
    if (t.rank_rows[size_t(p)] > shape.max_rows) first_over = p;
  CHECK(over_capacity(t.view, shape) == first_over, "first rank over capacity");
}

void test_routing() {
  Random rnd(1);
  for (int trial = 0; trial < 300; ++trial) {
    const Routed r = random_routing(rnd);
    Tiles tiles{};
    tiles.block_m = int32_t(rnd.in(1, 20));
    for (int32_t e = 0; e < r.shape.experts; ++e) check_segment_windows(r, e, rnd);
    for (int32_t me = 0; me < r.shape.ranks; ++me) {
      const RouteTables t(r, tiles.block_m, me);
      check_way_back(r, t, me);
      check_layout_of_segments(r, t, tiles);
      check_capacity(r, t, rnd);
    }
  }
  const int32_t ids[] = {3, -1, 0, 7, -2, 4};
  int32_t counts[4];
  CHECK(count_slots(ids, 6, 4, counts) == 3, "the first bad id is named");
  CHECK(counts[0] == 1 && counts[1] == 0 && counts[2] == 0 && counts[3] == 1, "bad ids are not counted");
}

void test_layout_and_protocol() {
  Random rnd(2);
  for (int trial = 0; trial < 200; ++trial) {
    const Shape s{int32_t(rnd.in(1, 8)), 24, int32_t(rnd.in(1, 8)), trial % 2 ? 2 : 4, rnd.in(0, 300), rnd.in(1, 300),
                  rnd.in(1, 300), 0, rnd.in(0, 3000)};
    const ArenaLayout a = arena_layout(s, kTiles);
    const int64_t rows = padded_rows(s, kTiles), line = s.hidden * s.elem_bytes;
    const std::pair<int64_t, int64_t> parts[] = {
        {a.verdict, int64_t(sizeof(Verdict))}, {a.tokens_in, s.tokens * line}, {a.grads_in, s.tokens * line},  {a.rows_out, rows * line}, {a.weights, s.slots() * 4},
        {a.weight_grads, rows * 4},     {a.slots, s.slots() * 4},       {a.counts, s.experts * 4}};
    CHECK(a.verdict == 0, "ranks of unlike shapes find each other's verdict");
    int64_t end = 0;
    for (auto [at, bytes] : parts) {
      CHECK(at >= end && at % 256 == 0, "parts of the arena do not overlap and are aligned");
      end = at + bytes;
    }
    CHECK(end <= a.bytes && a.flag_bytes == s.ranks * (rows / kTiles.block_m) * 8, "sizes of the arena");
  }
  const uint64_t word = pack_abort(123456789012, Wait::finish, 71);
  CHECK(abort_generation(word) == 123456789012, "abort word");
  CHECK((abort_status(word) == Status{Code::peer_timeout, 71, int64_t(Wait::finish), 0}), text(abort_status(word)));

  const Shape base{2, 4, 2, 4, 8, 16, 24, 0, 32};
  for (int field = 0; field < 9; ++field) {
    Shape other = base;
    int32_t* small[] = {&other.ranks, &other.experts, &other.top_k, &other.elem_bytes};
    int64_t* large[] = {&other.tokens, &other.hidden, &other.inter, &other.shared_inter, &other.max_rows};
    if (field < 4) *small[field] += 1; else *large[field - 4] += 1;
    CHECK(shape_digest(other) != shape_digest(base), "the digest sees field " + num(field));
  }
}

}  // namespace
}  // namespace mok::cpu
