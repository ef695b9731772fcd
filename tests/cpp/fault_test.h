// Faults, the order of calls, and memory that grows. Part of cpu_test.cc.
#pragma once

#include "layer_test.h"

namespace mok::cpu {
namespace {

// ---- faults ----

Problem small_problem(uint64_t seed = 50) {
  return make_problem({"small", 12, 2, 24, 20, 12, 6, Ids::with_none}, 4, seed);
}

// One forward call on all ranks; `expected` on every one.
void expect_forward(Group& group, const Problem& p, const Shape& s, const Status& expected, Mode mode = {}) {
  Results out(p, group.ranks());
  const CallKey key = new_call(kForwardSite);
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
    const Status status = bad_id(1, {5 / s.top_k, 5 % s.top_k, s.experts, bad});
    const BadId read = bad_id_of(status);
    CHECK(read.token * s.top_k + read.k == 5 && read.experts == 12 && read.id == bad, "a status keeps all of it");
    expect_forward(group, p, s, status);
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
  const CallKey key = new_call(kForwardSite);
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
  const LateCall late{new_call(kForwardSite)};
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
  const CallKey key = new_call(kForwardSite);
  on_ranks(3, [&](int32_t rank) {
    if (rank == 1) {
      try {
        const Entrance entrance(group, rank, key, arena_layout(p.shape(3), kTiles), kPatient);
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
  const CallKey key = new_call(kForwardSite);
  try {
    const Entrance entrance(group, 1, key, arena_layout(p.shape(2), kTiles), kPatient);
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
    const CallKey key = new_call(kForwardSite);
    const Entrance inside(group, 0, key, arena_layout(small.shape(3), kTiles), kPatient);
    const uint8_t* arena = group.arena(0);
    come_late(group, large, late);
    CHECK(group.arena(0) == arena, "arenas stay while a call is in flight");
    for (int32_t rank = 1; rank < 3; ++rank) Entrance(group, rank, key, arena_layout(small.shape(3), kTiles), kPatient);
  }
  expect_healthy(group, small);
}

// More abandoned calls than a group remembers.
void test_many_abandoned_calls() {
  const Problem p = small_problem();
  Group group(3);
  for (int i = 0; i < 100; ++i) {
    const CallKey key = new_call(kForwardSite);
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
    const CallKey key_a = new_call(kForwardSite), key_b{key_a.run, kOtherSite};
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
    const CallKey key = new_call(kForwardSite);
    const Entrance inside(group, 0, key, arena_layout(small.shape(4), kTiles), kPatient);
    group.release();
    group.poison();
    CHECK(group.held_bytes() == after, "while a call is in flight");
    for (int32_t rank = 1; rank < 4; ++rank)
      Entrance(group, rank, key, arena_layout(small.shape(4), kTiles), kPatient);
  }
  group.release();
  CHECK(group.held_bytes() == 0, "until they are released");
  expect_healthy(group, small);
}

void test_registry() {
  auto get = [](const char* name, int32_t ranks) { return get_group({name, ranks, false}, 0, kPatient); };
  const auto a = get("x=3/0", 3), b = get("x=3/1", 3), again = get("x=3/0", 3);
  CHECK(get("y=3/0", 3) != a, "another axis, another group");
  CHECK(a == again && a != b && a->ranks() == 3, "groups by number");
  auto one = get("x=1/0", 1);
  const Group* first = one.get();
  const auto other = get("x=1/0", 1);
  CHECK(one != other, "busy groups of one are not shared");
  one.reset();
  one = get("x=1/5", 1);
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
    keys.push_back(new_call(kForwardSite));
    results.emplace_back(problems[size_t(which.back())], kRanks);
  }
  on_ranks(kRanks, [&](int32_t rank) {
    for (size_t i = 0; i < kCalls; ++i) {
      const Problem& p = problems[size_t(which[i])];
      const Mode mode{i % 2 == 0, 1 + int(i % 3)};
      CHECK(forward(group, keys[i], p, p.shape(kRanks), rank, &results[i], mode).ok(), "forward " + num(int64_t(i)));
      const CallKey back{keys[i].run, kBackwardSite};
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
