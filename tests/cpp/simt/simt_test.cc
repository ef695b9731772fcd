// The kernels' control code on a CPU: the routing kernel, and the movers of the main kernels around a stand-in for the
// tensor cores, for groups of several ranks. What is tested is the source of the kernels, but for the instructions.
//
//   ids -> mok_route (a grid for every rank) -> movers pull, "experts" compute, movers fetch and combine -> y
#include <sys/mman.h>
#include <unistd.h>

#define MOK_HIDDEN 64
#define MOK_INTER 72
#define MOK_TOP_K 3
#define MOK_SHARED_INTER 0

#include "core/routing.h"
#include "device/movers.h"
#include "device/route.cu"
#include "ffi/cuda_workspace.h"

// The dynamic shared memory that mok_route declares.
alignas(16) thread_local int32_t memory[1 << 14];

namespace mok {
namespace {

#define CHECK(condition, ...)                                                                \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "simt_test.cc:%d: %s does not hold: ", __LINE__, #condition);     \
      std::fprintf(stderr, __VA_ARGS__);                                                     \
      std::fprintf(stderr, "\n");                                                            \
      std::_Exit(1);                                                                         \
    }                                                                                        \
  } while (0)

constexpr int kClusters = 2, kMoverBlocks = 2, kMoverThreads = 128;
constexpr DownSignals kSignals = {5, 3};

uint32_t random(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

// An arena: only what is touched takes memory.
uint8_t* new_arena() {
  const int64_t bytes = int64_t{6} << 30;
  void* at = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(at != MAP_FAILED, "no address space");
  return static_cast<uint8_t*>(at);
}

// The inputs of the global batch.
struct Batch {
  Shape shape;  // of one rank when there is only one
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<uint16_t> x;

  Batch(int64_t tokens, int32_t experts, uint32_t seed, int skew) : shape{1, experts, kTopK, 2, tokens, kHidden, MOK_INTER, 0, 0} {
    uint32_t s = seed;
    for (int64_t i = 0; i < shape.slots(); ++i) {
      const uint32_t r = random(s);
      ids.push_back(r % 16 == 0 ? -1 : skew == 0 ? int32_t(r / 16 % uint32_t(experts)) : skew == 1 ? experts - 1 : -1);
      weights.push_back(float(random(s) % 1000) / 1000 - 0.3f);
    }
    for (int64_t i = 0; i < tokens * kHidden; ++i) x.push_back(uint16_t(0x3f00 + random(s) % 256));
    shape.max_rows = shape.slots();
  }
};

// What the stand-in for an expert makes of a number: its exponent is raised, which is exact.
uint16_t apply_expert(uint16_t x, int32_t e) { return uint16_t(x + (e % 5) * 128); }

struct Hooks {
  const MoverParams& p;
  void pulled(int64_t, int32_t, int32_t) const {}
  void fetched(int32_t, int32_t, int32_t) const {}
  float weight(int64_t slot) const { return p.router_weights[slot]; }
  void summed(int64_t, int64_t) const {}
  void failed(int64_t) const {}
};

// A warp in the place of producer and tensor cores: pairs in order, each when its rows are there.
void compute_pairs(const MoverParams& p, int lane) {
  const Counter words{p.max_pairs, p.local_experts};
  for (int32_t pair = 0; pair < p.routes.totals[Total::pairs]; ++pair) {
    const bool split = p.routes.pair_split[pair] != 0;
    const int32_t rows = split ? 128 : 256, row = p.routes.pair_row[pair];
    if (has_failed(p.call) || !wait_counter(p.call, p.routes.counters + words.pulled(pair), uint32_t(rows))) return;
    const int32_t e = p.call.coords[0] * p.local_experts + p.routes.pair_expert[pair];
    auto* out = const_cast<uint16_t*>(p.rows_out) + int64_t{row} * kHidden;
    if (lane == 0)
      for (int64_t i = 0; i < int64_t{rows} * kHidden; ++i) out[i] = apply_expert(p.rows_in[0][int64_t{row} * kHidden + i], e);
    __syncwarp();
    if (lane == 0) add_acquire_release_gpu(p.routes.counters + words.out(pair), split ? kSignals.split : kSignals.full);
    if (p.call.ranks > 1) flag_homes(p, pair, lane);
  }
}

void movers_kernel(const MoverParams& p) {
  const Hooks hooks{p};
  const int warp = threadIdx.x / 32, lane = simt::lane();
  const Movers<Hooks> movers{p, hooks, lane};
  if (warp == 0) {
    if (blockIdx.x == 0) compute_pairs(p, lane);
  } else {
    movers.pull();
    if (p.call.ranks > 1 && warp != 3) movers.fetch();
  }
  movers.combine<4>(kSignals);
  if (p.call.ranks > 1 && blockIdx.x == 0 && warp == 1) movers.leave();
}

// Ranks of one group, each with an arena.
class Group {
 public:
  explicit Group(int32_t ranks) : statuses(size_t(ranks), HostStatus{}), ranks_(ranks) {
    for (int32_t r = 0; r < ranks; ++r) arenas_.push_back(new_arena());
  }
  ~Group() {
    for (uint8_t* a : arenas_) munmap(a, size_t(int64_t{6} << 30));
  }

  // One call on all ranks but those absent. Rank r sits on seat (r + turn) % ranks.
  struct Result {
    std::vector<uint16_t> y;
    std::vector<int32_t> status;
  };
  Result run(const Batch& b, int32_t absent = -1, int64_t max_rows = -1, int turn = 0) {
    ++generation;
    Result result{std::vector<uint16_t>(b.x.size(), 0xffff), std::vector<int32_t>(size_t(ranks_), -7)};
    std::vector<std::thread> threads;
    for (int32_t r = 0; r < ranks_; ++r)
      if (r != absent) threads.emplace_back([&, r] { run_rank(b, r, max_rows, (r + turn) % ranks_, &result); });
    for (auto& t : threads) t.join();
    return result;
  }

  std::vector<HostStatus> statuses;
  uint64_t generation = 0;
  uint64_t acknowledged = ~uint64_t{0};  // all
  double timeout_s = 20;

 private:
  void run_rank(const Batch& b, int32_t rank, int64_t max_rows, int32_t seat, Result* result) {
    Shape s = b.shape;
    s.ranks = ranks_;
    s.tokens /= ranks_;
    if (max_rows >= 0) s.max_rows = max_rows;
    const ffi::Extent extent = ffi::extent_of(s);
    ffi::Pieces sizes(nullptr);
    RouteTables none{};
    ffi::take_routes(sizes, s, 64, &none);
    std::vector<uint8_t> work(size_t(sizes.bytes()), 0xff);
    ffi::Pieces pieces(work.data());
    RouteTables routes{};
    ffi::take_routes(pieces, s, 64, &routes);
    const ArenaLayout layout = arena_layout(s, ffi::kCudaTiles);
    std::vector<uint16_t> rows_in(size_t(extent.rows * kHidden), 0xffff), rows_out(rows_in), back(size_t(s.slots() * kHidden), 0xffff);
    std::vector<int32_t> per_expert(size_t(s.experts), -7), per_rank(size_t(ranks_), -7);
    const int32_t coords[] = {rank, 3};
    CallState call{};
    call.generation = generation;
    call.acknowledged = acknowledged;
    call.deadline_ns = uint64_t(timeout_s * 1e9);
    call.failed = routes.counters + Counter::failed;
    call.status = &result->status[size_t(rank)];
    call.host_status = &statuses[size_t(seat)];
    call.coords = coords;
    call.ranks = ranks_;
    if (ranks_ > 1) {
      call.seat = seat;
      call.seats = ranks_;
      for (int32_t i = 0; i < ranks_; ++i) call.seat_memory[i] = arenas_[size_t(i)];
      routes.sorted = reinterpret_cast<int32_t*>(arenas_[size_t(seat)] + SeatMemory::rows + layout.slots);
    }
    const Published x{b.x.data() + rank * s.tokens * kHidden, layout.tokens_in};
    const int32_t* ids = b.ids.data() + rank * s.slots();
    const RouteParams route{call, routes, s, layout, ids, {x, {}}, nullptr, per_expert.data(), per_rank.data(), extent.pairs};
    simt::launch(8 * (ranks_ > 1 ? kClusters : 1), 8, 1024, [&] { mok_route(route); });
    if (*call.status == 0) {
      check_counts(b, per_expert, per_rank);
      check_own_rows_first(routes, s, rank);
    }

    MoverParams p{};
    p.call = call;
    p.routes = routes;
    p.layout = layout;
    p.ids = ids;
    p.router_weights = b.weights.data() + rank * s.slots();
    p.published[0] = x;
    p.rows_in[0] = rows_in.data();
    p.rows_out = ranks_ > 1 ? reinterpret_cast<uint16_t*>(arenas_[size_t(seat)] + SeatMemory::rows + layout.rows_out) : rows_out.data();
    p.rows_back = back.data();
    p.sum = result->y.data() + rank * s.tokens * kHidden;
    p.tokens = s.tokens;
    p.local_experts = s.local_experts();
    p.max_rows = extent.rows;
    p.max_pairs = extent.pairs;
    p.max_blocks = extent.blocks;
    simt::launch(kMoverBlocks, kMoverBlocks, kMoverThreads, [&] { movers_kernel(p); });
  }

  // Pairs of row blocks whose rows are of several ranks begin with those of the rank itself.
  static void check_own_rows_first(const RouteTables& t, const Shape& s, int32_t rank) {
    std::vector<int32_t> seen(size_t(s.local_experts()));
    for (int32_t pair = 0; pair < t.totals[Total::pairs]; ++pair) {
      const int32_t e = t.pair_expert[pair], before = rank == 0 ? 0 : t.sources[e * s.ranks + rank - 1].end;
      const int32_t at = t.pair_row[pair] - t.segment_start[rank * s.local_experts() + e];
      const bool in_split = before / 256 >= (t.sources[(e + 1) * s.ranks - 1].end + 127) / 128 / 2;
      if (seen[size_t(e)]++ == 0 && !in_split) CHECK(at <= before && before < at + 256, "rank %d begins at %d", rank, at);
    }
  }

  void check_counts(const Batch& b, const std::vector<int32_t>& per_expert, const std::vector<int32_t>& per_rank) const {
    std::vector<int32_t> want(per_expert.size());
    for (int32_t id : b.ids)
      if (id >= 0) ++want[size_t(id)];
    CHECK(per_expert == want, "tokens per expert");
    for (size_t e = 0, local = want.size() / per_rank.size(); e < want.size(); e += local) {
      int32_t sum = 0;
      for (size_t i = e; i < e + local; ++i) sum += want[i];
      CHECK(per_rank[e / local] == sum, "rows per rank");
    }
  }

  const int32_t ranks_;
  std::vector<uint8_t*> arenas_;
};

std::vector<uint16_t> expected(const Batch& b) {
  std::vector<uint16_t> y;
  for (int64_t t = 0; t < b.shape.tokens; ++t)
    for (int64_t i = 0; i < kHidden; ++i) {
      float sum = 0;
      for (int64_t slot = t * kTopK; slot < (t + 1) * kTopK; ++slot)
        if (b.ids[size_t(slot)] >= 0)
          sum = std::fma(b.weights[size_t(slot)], __uint_as_float(uint32_t(apply_expert(b.x[size_t(t * kHidden + i)], b.ids[size_t(slot)])) << 16), sum);
      y.push_back(uint16_t(to_bf16(sum)));
    }
  return y;
}

bool all_nan(const std::vector<uint16_t>& y) {
  for (uint16_t v : y)
    if ((v & 0x7fff) <= 0x7f80) return false;
  return true;
}

void test_any_number_of_ranks() {
  struct {
    int64_t tokens;
    int32_t experts;
    int skew;
  } cases[] = {{4, 4, 0}, {340, 40, 0}, {1268, 8, 0}, {1268, 4, 0}, {340, 8, 1}, {340, 4, 2}};
  for (auto [tokens, experts, skew] : cases) {
    const Batch b(tokens, experts, uint32_t(tokens), skew);
    for (int32_t ranks : {1, 2, 4}) {
      Group group(ranks);
      for (int turn = 0; turn < (ranks == 2 ? 2 : 1); ++turn) {
        const auto got = group.run(b, -1, -1, turn);
        for (int32_t status : got.status) CHECK(status == 0, "status %d, %d ranks", status, ranks);
        CHECK(got.y == expected(b), "%d ranks, %d experts, %ld tokens, ids of kind %d", ranks, experts, long(tokens), skew);
      }
    }
  }
}

void check_right(Group& group, const Batch& b) { CHECK(group.run(b).y == expected(b), "the next call is right"); }

void check_failed(Group& group, const Group::Result& got, Code code, int32_t rank, int32_t absent = -1) {
  CHECK(all_nan(got.y), "a failed call is NaN");
  for (size_t seat = 0; seat < group.statuses.size(); ++seat) {
    if (int32_t(seat) == absent) continue;
    HostStatus& s = group.statuses[seat];
    CHECK(s.code == uint64_t(code) && s.rank == rank, "seat %d hears of %d by rank %d", int(seat), int(s.code), int(s.rank));
    CHECK(got.status[seat] == int32_t(code), "status of rank %d is %d", int(seat), got.status[seat]);
    s.code = 0;
  }
}

void test_judged_failures() {
  for (int32_t ranks : {1, 2, 4}) {
    const Batch good(340, 8, 1, 0);
    Batch bad = good;
    bad.ids.back() = 8;
    Group group(ranks);
    for (int i = 0; i < 2; ++i) {
      check_failed(group, group.run(bad), Code::id_out_of_range, ranks - 1);
      check_right(group, good);
    }
    const Batch crowded(340, 8, 1, 1);
    check_failed(group, group.run(crowded, -1, 500), Code::over_capacity, ranks - 1);
    check_right(group, good);
  }
}

void test_a_rank_that_never_comes() {
  const Batch b(340, 8, 1, 0);
  for (auto [ranks, absent] : {std::pair{2, 0}, std::pair{2, 1}, std::pair{4, 2}}) {
    Group group(ranks);
    group.timeout_s = 0.5;
    check_failed(group, group.run(b, absent), Code::peer_timeout, absent, absent);
    group.timeout_s = 20;
    check_right(group, b);
  }
}

void test_a_rank_that_comes_too_late() {
  const Batch b(340, 8, 1, 0);
  Group group(2);
  group.timeout_s = 0.5;
  check_failed(group, group.run(b, 1), Code::peer_timeout, 1, 1);
  --group.generation;
  group.timeout_s = 20;
  check_failed(group, group.run(b, 0), Code::peer_timeout, 1, 0);
  check_right(group, b);
}

// Launched before the host had heard of the first one's failure.
void test_calls_behind_a_failure() {
  for (int32_t ranks : {2, 4}) {
    const Batch good(340, 8, 1, 0);
    Batch bad = good;
    bad.ids.back() = 8;
    Group group(ranks);
    group.acknowledged = 0;
    const auto first = group.run(bad), second = group.run(good), third = group.run(good);
    CHECK(all_nan(second.y) && all_nan(third.y), "they fail with it");
    for (int32_t status : third.status) CHECK(status != 0, "and say so");
    check_failed(group, first, Code::id_out_of_range, ranks - 1);  // the host hears of the first
    group.acknowledged = group.generation;
    check_right(group, good);
  }
}

}  // namespace
}  // namespace mok

int main() {
  alarm(400);  // nothing here may hang
  const std::pair<const char*, void (*)()> tests[] = {
      {"any number of ranks", mok::test_any_number_of_ranks},
      {"judged failures", mok::test_judged_failures},
      {"a rank that never comes", mok::test_a_rank_that_never_comes},
      {"a rank that comes too late", mok::test_a_rank_that_comes_too_late},
      {"calls behind a failure", mok::test_calls_behind_a_failure},
  };
  for (auto [name, test] : tests) {
    const auto start = std::chrono::steady_clock::now();
    test();
    const std::chrono::duration<double> s = std::chrono::steady_clock::now() - start;
    std::printf("%-28s ok %7.2f s\n", name, s.count());
    std::fflush(stdout);
  }
  return 0;
}
