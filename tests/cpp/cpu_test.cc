// The C++ side on its own: routing, task stream and whole calls, one thread per rank, no XLA. Sanitizers run this too.
//
//   inputs of the global batch -> run on P ranks in every mode -> same bits as on one rank -> close to the f64 oracle
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../../cuda/cpu/layer.h"

namespace mok::cpu {
namespace {

// ---- checking ----

[[noreturn]] void fail(int line, const char* condition, const std::string& where) {
  std::fprintf(stderr, "cpu_test.cc:%d: %s does not hold: %s\n", line, condition, where.c_str());
  std::fflush(stderr);
  std::_Exit(1);  // other ranks' threads may be waiting for this one: an orderly exit could hang
}
#define CHECK(condition, where) \
  do { if (!(condition)) fail(__LINE__, #condition, where); } while (0)

std::string num(int64_t v) { return std::to_string(v); }

std::string text(const Status& s) {
  return "Status{" + num(int64_t(s.code)) + ", rank " + num(s.rank) + ", " + num(s.value) + ", " + num(s.extra) + "}";
}

bool operator==(const Status& a, const Status& b) {
  return a.code == b.code && a.rank == b.rank && a.value == b.value && a.extra == b.extra;
}

// splitmix64: the same numbers with every compiler and library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t in(int64_t lo, int64_t hi) { return lo + int64_t(bits() % uint64_t(hi - lo + 1)); }
  double unit() { return double(bits() >> 11) * 0x1p-53; }
  double normal() { return (unit() + unit() + unit() + unit() - 2.0) * 1.7320508; }

 private:
  uint64_t state_;
};

template <class Body>
void on_ranks(int32_t ranks, Body body) {
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r) threads.emplace_back([&body, r] { body(r); });
  for (auto& t : threads) t.join();
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

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
        {a.tokens_in, s.tokens * line}, {a.grads_in, s.tokens * line},  {a.rows_out, rows * line}, {a.weights, s.slots() * 4},
        {a.weight_grads, rows * 4},     {a.slots, s.slots() * 4},       {a.counts, s.experts * 4}, {a.verdict, int64_t(sizeof(Verdict))}};
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

// ---- a problem: the inputs of a global batch ----

// Elements in bf16 or f32, of exactly the size that XLA would hand over, so that ASan sees a byte too far.
class Tensor {
 public:
  Tensor() = default;
  Tensor(int64_t n, int32_t elem) : elem_(elem), bytes_(size_t(n * elem), 0xff) {}  // 0xffff...: NaN in both

  int64_t size() const { return elem_ == 0 ? 0 : int64_t(bytes_.size()) / elem_; }
  void* at(int64_t i) { return bytes_.data() + i * elem_; }
  const void* at(int64_t i) const { return bytes_.data() + i * elem_; }
  bool operator==(const Tensor& o) const { return bytes_ == o.bytes_; }

  double get(int64_t i) const {
    float f;
    uint16_t half;
    if (elem_ == 4) { std::memcpy(&f, at(i), 4); return f; }
    std::memcpy(&half, at(i), 2);
    const uint32_t wide = uint32_t{half} << 16;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  void set(int64_t i, double v) {
    const float f = float(v);
    if (elem_ == 4) { std::memcpy(at(i), &f, 4); return; }
    uint32_t b;
    std::memcpy(&b, &f, 4);
    const uint16_t half = uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
    std::memcpy(at(i), &half, 2);
  }
  std::vector<double> values() const {
    std::vector<double> v;
    for (int64_t i = 0; i < size(); ++i) v.push_back(get(i));
    return v;
  }

 private:
  int32_t elem_ = 0;
  std::vector<uint8_t> bytes_;
};

enum class Ids { spread, with_none, few_experts, one_expert, none };

struct Case {
  const char* name;
  int32_t experts, top_k;
  int64_t tokens, hidden, inter, shared_inter;  // tokens of the global batch
  Ids ids;
};

struct Problem {
  Case c;
  int32_t elem;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  Tensor x, dy, gate, up, down, shared_gate, shared_up, shared_down;

  std::string name() const { return std::string(c.name) + (elem == 2 ? " bf16" : " f32"); }
  int64_t max_rows() const { return c.tokens * c.top_k; }  // the worst case
  Shape shape(int32_t ranks) const {
    return {ranks, c.experts, c.top_k, elem, c.tokens / ranks, c.hidden, c.inter, c.shared_inter, max_rows()};
  }
};

Tensor random_tensor(Random& rnd, int64_t n, int32_t elem, double scale) {
  Tensor t(n, elem);
  for (int64_t i = 0; i < n; ++i) t.set(i, rnd.normal() * scale);
  return t;
}

int32_t random_id(Random& rnd, const Case& c) {
  switch (c.ids) {
    case Ids::spread: return int32_t(rnd.in(0, c.experts - 1));
    case Ids::with_none: return int32_t(rnd.in(-1, c.experts - 1)) / (rnd.in(0, 3) ? 1 : c.experts);
    case Ids::few_experts: return rnd.in(0, 4) == 0 ? -1 : int32_t(rnd.in(0, 2)) * (c.experts / 3) + 1;
    case Ids::one_expert: return c.experts - 1;
    default: return -1;
  }
}

Problem make_problem(const Case& c, int32_t elem, uint64_t seed) {
  Random rnd(seed);
  Problem p;
  p.c = c;
  p.elem = elem;
  for (int64_t i = 0; i < c.tokens * c.top_k; ++i) {
    p.ids.push_back(random_id(rnd, c));
    // zero and negative weights are legal, and the gradient must not divide by them
    p.weights.push_back(rnd.in(0, 9) == 0 ? 0.0f : float(rnd.normal()));
  }
  const double in = 1.0 / std::sqrt(double(c.hidden)), mid = 1.0 / std::sqrt(double(c.inter));
  p.x = random_tensor(rnd, c.tokens * c.hidden, elem, 1.0);
  p.dy = random_tensor(rnd, c.tokens * c.hidden, elem, 1.0);
  p.gate = random_tensor(rnd, c.experts * c.hidden * c.inter, elem, in);
  p.up = random_tensor(rnd, c.experts * c.hidden * c.inter, elem, in);
  p.down = random_tensor(rnd, c.experts * c.hidden * c.inter, elem, mid);
  p.shared_gate = random_tensor(rnd, c.hidden * c.shared_inter, elem, in);
  p.shared_up = random_tensor(rnd, c.hidden * c.shared_inter, elem, in);
  p.shared_down = random_tensor(rnd, c.hidden * c.shared_inter, elem, mid);
  return p;
}

// ---- the oracle: the layer by its definition, in double ----

struct Oracle {
  std::vector<double> y, dx, d_weights, d_gate, d_up, d_down, d_shared_gate, d_shared_up, d_shared_down;
};

// One SwiGLU expert on one token, forward and backward, added into the oracle's sums with router weight w.
// Returns <dY W_d^T, h>.
double add_expert(int64_t H, int64_t I, double w, const double* x, const double* dy, const double* gate,
                  const double* up, const double* down, double* y, double* dx, double* d_gate, double* d_up,
                  double* d_down) {
  double dot = 0.0;
  std::vector<double> g(size_t(I), 0.0), u(g), dg(g), du(g);
  for (int64_t a = 0; a < H; ++a)
    for (int64_t i = 0; i < I; ++i) { g[size_t(i)] += x[a] * gate[a * I + i]; u[size_t(i)] += x[a] * up[a * I + i]; }
  for (int64_t i = 0; i < I; ++i) {
    const double s = 1.0 / (1.0 + std::exp(-g[size_t(i)])), silu = g[size_t(i)] * s, h = silu * u[size_t(i)];
    double dhu = 0.0;
    for (int64_t a = 0; a < H; ++a) {
      y[a] += w * h * down[i * H + a];
      d_down[i * H + a] += w * h * dy[a];
      dhu += dy[a] * down[i * H + a];
    }
    dot += dhu * h;
    dg[size_t(i)] = w * dhu * u[size_t(i)] * (s + silu * (1.0 - s));
    du[size_t(i)] = w * dhu * silu;
  }
  for (int64_t a = 0; a < H; ++a)
    for (int64_t i = 0; i < I; ++i) {
      dx[a] += dg[size_t(i)] * gate[a * I + i] + du[size_t(i)] * up[a * I + i];
      d_gate[a * I + i] += x[a] * dg[size_t(i)];
      d_up[a * I + i] += x[a] * du[size_t(i)];
    }
  return dot;
}

Oracle oracle(const Problem& p) {
  const Case& c = p.c;
  const int64_t H = c.hidden, HI = H * c.inter;
  const auto x = p.x.values(), dy = p.dy.values(), gate = p.gate.values(), up = p.up.values(), down = p.down.values();
  const auto sg = p.shared_gate.values(), su = p.shared_up.values(), sd = p.shared_down.values();
  auto zeros = [](const std::vector<double>& like) { return std::vector<double>(like.size(), 0.0); };
  Oracle o{zeros(x), zeros(x), std::vector<double>(p.weights.size(), 0.0), zeros(gate), zeros(up), zeros(down),
           zeros(sg), zeros(su), zeros(sd)};
  for (int64_t t = 0; t < c.tokens; ++t) {
    const int64_t row = t * H;
    for (int64_t slot = t * c.top_k; slot < (t + 1) * c.top_k; ++slot) {
      if (p.ids[size_t(slot)] < 0) continue;
      const int64_t e = p.ids[size_t(slot)] * HI;
      o.d_weights[size_t(slot)] = add_expert(
          H, c.inter, p.weights[size_t(slot)], &x[size_t(row)], &dy[size_t(row)], &gate[size_t(e)], &up[size_t(e)],
          &down[size_t(e)], &o.y[size_t(row)], &o.dx[size_t(row)], &o.d_gate[size_t(e)], &o.d_up[size_t(e)], &o.d_down[size_t(e)]);
    }
    if (c.shared_inter > 0)
      add_expert(H, c.shared_inter, 1.0, &x[size_t(row)], &dy[size_t(row)], sg.data(), su.data(), sd.data(), &o.y[size_t(row)],
                 &o.dx[size_t(row)], o.d_shared_gate.data(), o.d_shared_up.data(), o.d_shared_down.data());
  }
  return o;
}

// ---- running a problem on a group ----

// Results of all ranks. Routed ones are global arrays, each rank writes its part.
struct Results {
  Tensor y, dx, d_weights, d_gate, d_up, d_down;
  struct Rank {
    std::vector<int32_t> tokens_per_expert, rows_per_rank, status;
    Tensor rows, gate, up, shared_gate, shared_up;           // residuals
    Tensor d_shared_gate, d_shared_up, d_shared_down;
  };
  std::vector<Rank> ranks;

  Results(const Problem& p, int32_t n)
      : y(p.x.size(), p.elem), dx(p.x.size(), p.elem), d_weights(int64_t(p.weights.size()), 4), d_gate(p.gate.size(), p.elem),
        d_up(p.gate.size(), p.elem), d_down(p.gate.size(), p.elem) {
    const Shape s = p.shape(n);
    const int64_t rows = padded_rows(s, kTiles);
    for (int32_t r = 0; r < n; ++r)
      ranks.push_back({std::vector<int32_t>(size_t(s.experts), -7), std::vector<int32_t>(size_t(n), -7), {-7},
                       Tensor(rows * s.hidden, p.elem), Tensor(rows * s.inter, p.elem), Tensor(rows * s.inter, p.elem),
                       Tensor(s.tokens * s.shared_inter, p.elem), Tensor(s.tokens * s.shared_inter, p.elem),
                       Tensor(p.shared_gate.size(), p.elem), Tensor(p.shared_gate.size(), p.elem),
                       Tensor(p.shared_gate.size(), p.elem)});
  }

  SavedBuffers saved(int32_t rank, bool save) {
    Rank& r = ranks[size_t(rank)];
    if (!save) return {};
    return {r.rows.at(0), r.gate.at(0), r.up.at(0), r.shared_gate.at(0), r.shared_up.at(0)};
  }
  ForwardResults forward(const Shape& s, int32_t rank, bool save) {
    Rank& r = ranks[size_t(rank)];
    return {y.at(rank * s.tokens * s.hidden), r.tokens_per_expert.data(), r.rows_per_rank.data(), r.status.data(),
            saved(rank, save)};
  }
  BackwardResults backward(const Shape& s, int32_t rank) {
    Rank& r = ranks[size_t(rank)];
    const int64_t w = rank * s.local_experts() * s.hidden * s.inter;
    return {dx.at(rank * s.tokens * s.hidden), static_cast<float*>(d_weights.at(rank * s.slots())),
            {d_gate.at(w), d_up.at(w), d_down.at(w)},
            {r.d_shared_gate.at(0), r.d_shared_up.at(0), r.d_shared_down.at(0)}};
  }
  bool routed_equal(const Results& o) const {
    return y == o.y && dx == o.dx && d_weights == o.d_weights && d_gate == o.d_gate && d_up == o.d_up && d_down == o.d_down;
  }
  bool shared_equal(const Results& o) const {
    for (size_t r = 0; r < ranks.size(); ++r)
      if (!(ranks[r].d_shared_gate == o.ranks[r].d_shared_gate && ranks[r].d_shared_up == o.ranks[r].d_shared_up &&
            ranks[r].d_shared_down == o.ranks[r].d_shared_down))
        return false;
    return true;
  }
};

// Two call sites of a program; what tells them apart is their address.
const char kForwardSite = 0, kBackwardSite = 0, kOtherSite = 0;

CallKey new_call(const char* site) {
  static std::atomic<int64_t> run{0};
  return {++run, site};
}

constexpr double kPatient = 100.0;  // seconds: for calls that must succeed on a busy machine

CallArgs call_args(const Problem& p, const Shape& s, int32_t rank, double timeout_s) {
  const int64_t w = rank * s.local_experts() * s.hidden * s.inter;
  return {s, rank, timeout_s, p.x.at(rank * s.tokens * s.hidden), p.ids.data() + rank * s.slots(),
          p.weights.data() + rank * s.slots(), {p.gate.at(w), p.up.at(w), p.down.at(w)},
          {p.shared_gate.at(0), p.shared_up.at(0), p.shared_down.at(0)}};
}

struct Mode {
  bool save = true;
  int workers = 1;
  double timeout_s = kPatient;
};

Status forward(Group& group, CallKey key, const Problem& p, const Shape& s, int32_t rank, Results* out, Mode mode = {}) {
  const Entrance entrance(group, rank, key, arena_layout(s, kTiles));
  if (entrance.abandoned()) return entrance.why();
  return run_forward(group, entrance.generation(), call_args(p, s, rank, mode.timeout_s), out->forward(s, rank, mode.save),
                     mode.workers);
}

Status backward(Group& group, CallKey key, const Problem& p, const Shape& s, int32_t rank, Results* out, Mode mode = {}) {
  const Entrance entrance(group, rank, key, arena_layout(s, kTiles));
  if (entrance.abandoned()) return entrance.why();
  return run_backward(group, entrance.generation(), call_args(p, s, rank, mode.timeout_s), out->saved(rank, mode.save),
                      p.dy.at(rank * s.tokens * s.hidden), out->backward(s, rank), mode.workers);
}

// Forward and backward on all ranks; arenas and scratch are poisoned before each.
Results run_layer(Group& group, const Problem& p, Mode mode) {
  const Shape s = p.shape(group.ranks());
  Results out(p, group.ranks());
  for (auto [call, site] : {std::pair{&forward, &kForwardSite}, std::pair{&backward, &kBackwardSite}}) {
    group.poison();
    const CallKey key = new_call(site);
    on_ranks(group.ranks(), [&, call = call](int32_t rank) {
      const Status status = call(group, key, p, s, rank, &out, mode);
      CHECK(status.ok(), p.name() + ": " + text(status));
    });
  }
  return out;
}

// ---- values ----

double relative_l2(const std::vector<double>& got, const std::vector<double>& want, size_t first, size_t n) {
  double error = 0.0, norm = 0.0;
  for (size_t i = first; i < first + n; ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return norm == 0.0 ? std::sqrt(error) : std::sqrt(error / norm);  // what should be zero must be exactly zero
}

// The worst of the `parts` equal parts of a tensor: an expert must not hide behind the others.
void check_close(const Tensor& got, const std::vector<double>& want, int64_t parts, double tolerance, const std::string& where) {
  const std::vector<double> v = got.values();
  const size_t n = want.size() / size_t(parts);
  for (int64_t part = 0; part < parts; ++part) {
    const double error = relative_l2(v, want, size_t(part) * n, n);
    CHECK(error <= tolerance, where + " part " + num(part) + " is off by " + std::to_string(error * 1e6) + "e-6");
  }
}

void check_routed_values(const Problem& p, const Results& r, const Oracle& o) {
  const double whole = p.elem == 4 ? 2e-6 : 4e-3, expert = p.elem == 4 ? 2e-6 : 6e-3;
  check_close(r.y, o.y, 1, whole, p.name() + " y");
  check_close(r.dx, o.dx, 1, expert, p.name() + " dx");
  check_close(r.d_weights, o.d_weights, 1, expert, p.name() + " dw");
  check_close(r.d_gate, o.d_gate, p.c.experts, expert, p.name() + " d_gate");
  check_close(r.d_up, o.d_up, p.c.experts, expert, p.name() + " d_up");
  check_close(r.d_down, o.d_down, p.c.experts, expert, p.name() + " d_down");
}

// Shared weight gradients are per rank; their sum over ranks is the caller's.
void check_shared_values(const Problem& p, const Results& r, const Oracle& o) {
  if (p.c.shared_inter == 0) return;
  for (auto [part, want] : {std::pair{&Results::Rank::d_shared_gate, &o.d_shared_gate},
                            std::pair{&Results::Rank::d_shared_up, &o.d_shared_up},
                            std::pair{&Results::Rank::d_shared_down, &o.d_shared_down}}) {
    std::vector<double> sum(want->size(), 0.0);
    for (const auto& rank : r.ranks)
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += (rank.*part).get(int64_t(i));
    CHECK(relative_l2(sum, *want, 0, sum.size()) <= (p.elem == 4 ? 2e-6 : 6e-3), p.name() + " shared weight gradients");
  }
}

void check_stats(const Problem& p, const Results& r) {
  std::vector<int32_t> experts(size_t(p.c.experts), 0), ranks(r.ranks.size(), 0);
  for (int32_t e : p.ids)
    if (e >= 0) { ++experts[size_t(e)]; ++ranks[size_t(e) / (experts.size() / ranks.size())]; }
  for (const auto& rank : r.ranks)
    CHECK(rank.tokens_per_expert == experts && rank.rows_per_rank == ranks && rank.status[0] == 0, p.name() + " stats");
}

// The determinism contract on one problem: one result for every P, residual policy and number of workers.
void check_problem(const Problem& p, const std::vector<int32_t>& group_sizes) {
  const Oracle truth = oracle(p);
  const auto alone = std::make_shared<Group>(1);
  const Results reference = run_layer(*alone, p, {});
  check_routed_values(p, reference, truth);
  for (int32_t ranks : group_sizes) {
    Group group(ranks);
    const std::string where = p.name() + " on " + num(ranks) + " ranks";
    const Results saved = run_layer(group, p, {});
    check_stats(p, saved);
    check_shared_values(p, saved, truth);
    CHECK(saved.routed_equal(reference), where + ": same bits as on one");
    for (Mode mode : {Mode{false, 1}, Mode{true, 3}, Mode{false, 4}}) {
      const Results other = run_layer(group, p, mode);
      CHECK(other.routed_equal(saved) && other.shared_equal(saved),
            where + (mode.save ? ", saved, " : ", recomputed, ") + num(mode.workers) + " workers: same bits");
    }
  }
}

void test_layer() {
  const Case cases[] = {
      {"two tiles each way", 24, 2, 48, 261, 131, 0, Ids::spread},
      {"odd sizes, shared expert, ids -1", 24, 3, 48, 67, 45, 131, Ids::with_none},
      {"empty experts", 24, 2, 72, 33, 17, 5, Ids::few_experts},
      {"all to one expert", 24, 2, 120, 40, 24, 0, Ids::one_expert},
      {"no experts at all", 24, 2, 24, 16, 8, 0, Ids::none},
      {"no experts but a shared one", 24, 1, 24, 16, 8, 24, Ids::none},
  };
  uint64_t seed = 100;
  for (int32_t elem : {4, 2}) {
    for (const Case& c : cases) check_problem(make_problem(c, elem, ++seed), {1, 2, 3, 4, 8});
    check_problem(make_problem({"one token a rank", 8, 2, 8, 37, 19, 11, Ids::with_none}, elem, ++seed), {1, 2, 4, 8});
    check_problem(make_problem({"no tokens", 4, 2, 0, 9, 5, 3, Ids::spread}, elem, ++seed), {1, 2});
    check_problem(make_problem({"a rack", 72, 4, 144, 24, 16, 8, Ids::spread}, elem, ++seed), {72});
  }
  // in f32 only: the bound for bf16 is one for the mean of many roundings
  check_problem(make_problem({"one of everything", 1, 1, 1, 1, 1, 0, Ids::spread}, 4, ++seed), {1});
}

// A token's rows do not depend on the other tokens of the batch: the definition of batch invariance.
void test_batch_invariance() {
  const Problem p = make_problem({"whole batch", 6, 2, 120, 67, 35, 9, Ids::few_experts}, 2, 7);
  Problem part = p;
  part.c.tokens = 13;
  Group group(1), small(1);
  const Results all = run_layer(group, p, {}), few = run_layer(small, part, {});
  CHECK(std::memcmp(all.y.at(0), few.y.at(0), size_t(13 * 67 * 2)) == 0, "y of the first tokens");
  CHECK(std::memcmp(all.dx.at(0), few.dx.at(0), size_t(13 * 67 * 2)) == 0, "dx of the first tokens");
}

// ---- faults ----

Problem small_problem(uint64_t seed = 50) {
  return make_problem({"small", 12, 2, 24, 20, 12, 6, Ids::with_none}, 4, seed);
}

// One forward call on all ranks; `expected` on every one.
void expect_forward(Group& group, const Problem& p, const Shape& s, const Status& expected, Mode mode = {}) {
  Results out(p, group.ranks());
  const CallKey key = new_call(&kForwardSite);
  on_ranks(group.ranks(), [&](int32_t rank) {
    const Status got = forward(group, key, p, s, rank, &out, mode);
    CHECK(got == expected, "rank " + num(rank) + " got " + text(got) + ", expected " + text(expected));
  });
}

// After whatever happened, the group still computes the right bits.
void expect_healthy(Group& group, const Problem& p) {
  Group alone(1);
  const Results want = run_layer(alone, p, {}), got = run_layer(group, p, {});
  CHECK(got.routed_equal(want), "the call after a fault");
}

void test_bad_ids() {
  for (int32_t bad : {12, -2, INT32_MIN, INT32_MAX}) {
    Problem p = small_problem();
    Group group(3);
    const Shape s = p.shape(3);
    p.ids[size_t(s.slots() + 5)] = bad;
    p.ids[size_t(s.slots() + 9)] = bad;
    p.ids[size_t(2 * s.slots())] = bad;
    expect_forward(group, p, s, {Code::id_out_of_range, 1, 5, bad});
    expect_healthy(group, small_problem());
  }
}

void test_over_capacity() {
  const Problem p = make_problem({"crowded", 12, 2, 24, 20, 12, 0, Ids::one_expert}, 4, 51);
  Group group(4);
  Shape s = p.shape(4);
  s.max_rows = 47;
  expect_forward(group, p, s, {Code::over_capacity, 3, 48, 47});
  Mode lean;
  lean.save = false;
  s.max_rows = 48;
  expect_forward(group, p, s, {}, lean);
  expect_healthy(group, p);
}

void test_shape_mismatch() {
  const Problem p = small_problem();
  Group group(3);
  Results out(p, 3);
  const CallKey key = new_call(&kForwardSite);
  on_ranks(3, [&](int32_t rank) {
    Shape s = p.shape(3);
    s.inter -= rank == 2;
    const Status got = forward(group, key, p, s, rank, &out);
    CHECK(got.code == Code::shape_mismatch, text(got));
  });
  expect_healthy(group, p);
}

// Rank 1 of 3 does not come to a call in time: what the others see, and their call's key for rank 1 to come late.
constexpr double kImpatient = 0.4;

struct LateCall {
  CallKey key;
  Status expected{Code::peer_timeout, 1, int64_t(Wait::routes), 0};
};

LateCall time_out_without_rank_1(Group& group, const Problem& p) {
  const LateCall late{new_call(&kForwardSite)};
  Results out(p, 3);
  const auto start = std::chrono::steady_clock::now();
  on_ranks(3, [&](int32_t rank) {
    if (rank == 1) return;
    const Status got = forward(group, late.key, p, p.shape(3), rank, &out, {true, 1, kImpatient});
    CHECK(got == late.expected, "rank " + num(rank) + " got " + text(got));
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(seconds >= kImpatient && seconds < kImpatient + 5, "timed out after " + std::to_string(seconds) + " s");
  return late;
}

void come_late(Group& group, const Problem& p, const LateCall& late) {
  Results out(p, 3);
  const Status got = forward(group, late.key, p, p.shape(3), 1, &out);
  CHECK(got == late.expected, "the late rank got " + text(got));
}

void test_late_rank() {
  const Problem p = small_problem();
  for (bool comes : {true, false}) {
    Group group(3);
    expect_healthy(group, p);
    const LateCall late = time_out_without_rank_1(group, p);
    if (comes) come_late(group, p, late);
    expect_healthy(group, p);
  }
}

// The late rank comes when the group is already past later calls.
void test_very_late_rank() {
  const Problem p = small_problem();
  Group group(3);
  const LateCall late = time_out_without_rank_1(group, p);
  expect_healthy(group, p);
  const uint64_t finished = load_acquire(group.flag(0, FlagLayout::finished, 1));
  come_late(group, p, late);
  CHECK(load_acquire(group.flag(0, FlagLayout::finished, 1)) >= finished, "flags only grow");
  expect_healthy(group, p);
}

// A rank that fails to run its part (out of memory, say) leaves by an exception.
void test_exception() {
  const Problem p = small_problem();
  Group group(3);
  Results out(p, 3);
  const CallKey key = new_call(&kForwardSite);
  on_ranks(3, [&](int32_t rank) {
    if (rank == 1) {
      try {
        const Entrance entrance(group, rank, key, arena_layout(p.shape(3), kTiles));
        throw std::runtime_error("out of memory");
      } catch (const std::runtime_error&) {
        return;
      }
    }
    const Status got = forward(group, key, p, p.shape(3), rank, &out, {true, 1, kImpatient});
    CHECK((got == Status{Code::peer_failed, 1, int64_t(Wait::failure), 0}), text(got));
  });
  expect_healthy(group, p);
}

// A rank that comes late to a call that ended so, past later calls, must not take their leftovers for its peers' rows.
void test_late_to_exception() {
  const Problem p = small_problem();
  Group group(2);
  const CallKey key = new_call(&kForwardSite);
  try {
    const Entrance entrance(group, 1, key, arena_layout(p.shape(2), kTiles));
    throw std::runtime_error("out of memory");
  } catch (const std::runtime_error&) {
  }
  expect_healthy(group, p);
  Results out(p, 2);
  const Status got = forward(group, key, p, p.shape(2), 0, &out, {true, 1, kImpatient});
  CHECK((got == Status{Code::peer_failed, 1, int64_t(Wait::failure), 0}), text(got));
  expect_healthy(group, p);
}

// A rank that comes late to a large call must not move the arenas under a later one.
void test_late_to_large_call() {
  const Problem small = small_problem();
  const Problem large = make_problem({"large", 12, 2, 96, 40, 30, 0, Ids::spread}, 4, 54);
  Group group(3);
  const LateCall late = time_out_without_rank_1(group, large);
  group.release();
  {
    const CallKey key = new_call(&kForwardSite);
    const Entrance inside(group, 0, key, arena_layout(small.shape(3), kTiles));
    const uint8_t* arena = group.arena(0);
    come_late(group, large, late);
    CHECK(group.arena(0) == arena, "arenas stay while a call is in flight");
    for (int32_t rank = 1; rank < 3; ++rank) Entrance(group, rank, key, arena_layout(small.shape(3), kTiles));
  }
  expect_healthy(group, small);
}

// More abandoned calls than a group remembers.
void test_many_abandoned_calls() {
  const Problem p = small_problem();
  Group group(3);
  for (int i = 0; i < 100; ++i) {
    const CallKey key = new_call(&kForwardSite);
    Results out(p, 3);
    on_ranks(3, [&](int32_t rank) {
      if (rank == 1) return;
      const Status got = forward(group, key, p, p.shape(3), rank, &out, {true, 1, 0.001});
      CHECK(got.code == Code::peer_timeout, text(got));
    });
  }
  expect_healthy(group, p);
}

// Independent calls reach the ranks in different orders, with different shapes: the arenas grow meanwhile.
void test_crossed_calls() {
  const Problem small = small_problem();
  const Problem large = make_problem({"large", 12, 2, 96, 40, 30, 0, Ids::spread}, 4, 52);
  Group alone(1);
  const Results want_small = run_layer(alone, small, {}), want_large = run_layer(alone, large, {});
  for (int trial = 0; trial < 12; ++trial) {
    Group group(3);
    Results a(small, 3), b(large, 3);
    const CallKey key_a = new_call(&kForwardSite), key_b{key_a.run, &kOtherSite};
    on_ranks(3, [&](int32_t rank) {
      auto call_a = [&] { CHECK(forward(group, key_a, small, small.shape(3), rank, &a).ok(), "small call"); };
      auto call_b = [&] { CHECK(forward(group, key_b, large, large.shape(3), rank, &b).ok(), "large call"); };
      const bool a_first = (rank + trial) % 2 == 0;
      std::thread first(a_first ? std::function<void()>(call_a) : call_b);
      sleep_ms(trial % 3);
      std::thread second(a_first ? std::function<void()>(call_b) : call_a);
      first.join();
      second.join();
    });
    CHECK(a.y == want_small.y && b.y == want_large.y, "crossed calls, trial " + num(trial));
  }
}

void test_arena_growth() {
  const Problem small = small_problem();
  const Problem large = make_problem({"large", 12, 2, 96, 40, 30, 0, Ids::spread}, 4, 53);
  Group group(4);
  CHECK(group.held_bytes() == 0, "nothing is allocated before the first call");
  expect_healthy(group, small);
  const int64_t before = group.held_bytes();
  expect_healthy(group, large);
  const int64_t after = group.held_bytes();
  CHECK(before > 0 && after > before, "arenas grow with the shape");
  expect_healthy(group, small);
  CHECK(group.held_bytes() == after, "and are kept");
  {
    const CallKey key = new_call(&kForwardSite);
    const Entrance inside(group, 0, key, arena_layout(small.shape(4), kTiles));
    group.release();
    group.poison();
    CHECK(group.held_bytes() == after, "while a call is in flight");
    for (int32_t rank = 1; rank < 4; ++rank)
      Entrance(group, rank, key, arena_layout(small.shape(4), kTiles));
  }
  group.release();
  CHECK(group.held_bytes() == 0, "until they are released");
  expect_healthy(group, small);
}

void test_registry() {
  const auto a = Group::get(3, "x=3", 0), b = Group::get(3, "x=3", 1), again = Group::get(3, "x=3", 0);
  CHECK(Group::get(3, "y=3", 0) != a, "another axis, another group");
  CHECK(a == again && a != b && a->ranks() == 3, "groups by number");
  auto one = Group::get(1, "x=1", 0);
  const Group* first = one.get();
  const auto other = Group::get(1, "x=1", 0);
  CHECK(one != other, "busy groups of one are not shared");
  one.reset();
  one = Group::get(1, "x=1", 5);
  CHECK(one.get() == first, "idle ones are used again");
  const int64_t before = held_bytes();
  expect_healthy(*a, small_problem());
  CHECK(held_bytes() == before + a->held_bytes(), "bytes of all groups");
  poison_all();
  expect_healthy(*a, small_problem());
}

// Ranks run ahead of each other through many calls of changing shapes; nothing but the protocol holds them together.
void test_many_generations() {
  constexpr int kRanks = 4, kCalls = 200;
  std::vector<Problem> problems;
  std::vector<Results> wanted;
  Random rnd(9);
  Group alone(1);
  for (int i = 0; i < 10; ++i) {
    const Ids ids = i % 3 == 0 ? Ids::few_experts : Ids::with_none;
    problems.push_back(make_problem({"changing", 12, int32_t(rnd.in(1, 3)), 4 * rnd.in(1, 12), rnd.in(1, 40), rnd.in(1, 30),
                                     rnd.in(0, 1) * rnd.in(1, 9), ids}, i % 2 ? 2 : 4, uint64_t(60 + i)));
    wanted.push_back(run_layer(alone, problems.back(), {}));
  }
  Group group(kRanks);
  std::vector<int> which;
  std::vector<CallKey> keys;
  std::vector<Results> results;
  for (int i = 0; i < kCalls; ++i) {
    which.push_back(int(rnd.in(0, int64_t(problems.size()) - 1)));
    keys.push_back(new_call(&kForwardSite));
    results.emplace_back(problems[size_t(which.back())], kRanks);
  }
  on_ranks(kRanks, [&](int32_t rank) {
    for (size_t i = 0; i < kCalls; ++i) {
      const Problem& p = problems[size_t(which[i])];
      const Mode mode{i % 2 == 0, 1 + int(i % 3)};
      CHECK(forward(group, keys[i], p, p.shape(kRanks), rank, &results[i], mode).ok(), "forward " + num(int64_t(i)));
      const CallKey back{keys[i].run, &kBackwardSite};
      CHECK(backward(group, back, p, p.shape(kRanks), rank, &results[i], mode).ok(), "backward " + num(int64_t(i)));
    }
  });
  for (size_t i = 0; i < kCalls; ++i)
    CHECK(results[i].routed_equal(wanted[size_t(which[i])]), "call " + num(int64_t(i)));
}

void run(const char* name, void (*test)()) {
  const auto start = std::chrono::steady_clock::now();
  test();
  std::printf("%-28s ok  %6.2f s\n", name, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  std::fflush(stdout);
}

}  // namespace
}  // namespace mok::cpu

int main() {
  using namespace mok::cpu;
  std::printf("tile kernels: %s\n", tile_ops(4).isa);
  run("routing", test_routing);
  run("layout and protocol", test_layout_and_protocol);
  run("task stream", test_task_stream);
  run("layer against oracle", test_layer);
  run("batch invariance", test_batch_invariance);
  run("bad ids", test_bad_ids);
  run("over capacity", test_over_capacity);
  run("shape mismatch", test_shape_mismatch);
  run("late rank", test_late_rank);
  run("very late rank", test_very_late_rank);
  run("exception", test_exception);
  run("late to an exception", test_late_to_exception);
  run("late to a large call", test_late_to_large_call);
  run("many abandoned calls", test_many_abandoned_calls);
  run("crossed calls", test_crossed_calls);
  run("arena growth", test_arena_growth);
  run("registry", test_registry);
  run("many generations", test_many_generations);
  return 0;
}
