// Groups whose ranks are in several processes: the same bits, memory that grows, and ranks that end, stop or never
// come. Part of cpu_test.cc, which starts itself again as `cpu_test --member HANDLE SCENARIO FIRST COUNT VICTIM STAGE`.
#pragma once

#include <csignal>
#include <dirent.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fault_test.h"

namespace mok::cpu {
namespace {

constexpr int32_t kMembers = 3;
const char* const kGroupName = "processes";

// Memory that nobody may touch. Put in the place of one of a rank's buffers it ends the process at the very stage that
// uses the buffer first.
void* forbidden() {
  void* const p = mmap(nullptr, size_t{1} << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED, "mmap");
  return p;
}

enum class Stage {
  routing, publish, dispatch, gate_up, combine, backward_publish, backward_tile, backward_combine, count
};
enum class End { killed, stopped, absent };

int g_end_signal = SIGKILL;
void end_here(int) { kill(getpid(), g_end_signal); }

// One rank's forward and backward calls, in which the victim ends at a stage.
struct DoomedRank {
  Group& group;
  const Problem& p;
  int32_t rank;
  Results* out;

  Status forward(CallKey key, Stage stage, bool victim, double timeout_s) {
    const Shape s = p.shape(group.ranks());
    CallArgs args = call_args(p, s, rank, timeout_s);
    ForwardResults results = out->forward(s, rank, true);
    if (victim && stage == Stage::routing) args.ids = static_cast<const int32_t*>(forbidden());
    if (victim && stage == Stage::publish) args.x = forbidden();
    if (victim && stage == Stage::dispatch) results.saved.rows = forbidden();
    if (victim && stage == Stage::gate_up) args.experts.gate = forbidden();
    if (victim && stage == Stage::combine) results.y = forbidden();
    const Entrance entrance(group, rank, key, arena_layout(s, kTiles), kPatient);
    return entrance.abandoned() ? entrance.why() : run_forward(group, entrance.generation(), args, results, 1);
  }
  Status backward(CallKey key, Stage stage, bool victim, double timeout_s) {
    const Shape s = p.shape(group.ranks());
    CallArgs args = call_args(p, s, rank, timeout_s);
    BackwardResults results = out->backward(s, rank);
    const void* dy = p.dy.at(rank * s.tokens * s.hidden);
    if (victim && stage == Stage::backward_publish) dy = forbidden();
    if (victim && stage == Stage::backward_tile) args.experts.down = forbidden();
    if (victim && stage == Stage::backward_combine) results.dx = forbidden();
    const Entrance entrance(group, rank, key, arena_layout(s, kTiles), kPatient);
    if (entrance.abandoned()) return entrance.why();
    return run_backward(group, entrance.generation(), args, out->saved(rank, true), dy, results, 1);
  }
};

// Every token goes to all ranks, so that a rank is missed at any stage.
Problem problem_for_all() {
  Problem p = small_problem(70);
  for (size_t i = 0; i < p.ids.size(); ++i) p.ids[i] = int32_t((i * 5 + i / 24) % 12);
  return p;
}

// What the members of a group with a victim do: a good call, the call in which it ends, and one more.
void meet_an_end(Group& group, int32_t rank, int32_t victim, Stage stage, End end) {
  const double timeout_s = end == End::killed ? 20.0 : 1.0;  // an end is noticed at once
  const Problem p = problem_for_all();
  Results good(p, kMembers), bad(p, kMembers);
  DoomedRank first{group, p, rank, &good}, second{group, p, rank, &bad};
  CHECK(first.forward({1, kForwardSite}, stage, false, kPatient).ok(), "the first call");
  CHECK(first.backward({1, kBackwardSite}, stage, false, kPatient).ok(), "the first backward call");
  if (rank == victim && end == End::absent) {
    for (;;) sleep_ms(1000);
  }
  if (rank == victim) {
    g_end_signal = end == End::killed ? SIGKILL : SIGSTOP;
    std::signal(SIGSEGV, end_here);
  }
  const auto start = std::chrono::steady_clock::now();
  Status got = second.forward({2, kForwardSite}, stage, rank == victim, timeout_s);
  if (stage >= Stage::backward_publish && end != End::absent) {
    CHECK(got.ok(), "the forward call before the end");
    got = second.backward({2, kBackwardSite}, stage, rank == victim, timeout_s);
  }
  CHECK(rank != victim, "the victim lives on");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const Code code = end == End::killed ? Code::peer_died : Code::peer_timeout;
  CHECK(got.code == code && got.rank == victim, "rank " + num(rank) + " got " + text(got) + " without " + num(victim));
  CHECK(seconds < (end == End::killed ? 3 : timeout_s + 2), std::to_string(seconds) + " s until the error");
  if (end != End::killed) return;
  const Status again = second.forward({3, kForwardSite}, stage, false, timeout_s);
  CHECK(again.code == Code::peer_died && again.rank == victim, "the call after: " + text(again));
}

// Calls of changing shapes, in one order on all ranks, with memory given back in between.
void run_changing_shapes(Group& group, int32_t rank, std::vector<Results>* results,
                         const std::vector<Problem>& problems) {
  for (size_t i = 0; i < results->size(); ++i) {
    const Problem& p = problems[i % problems.size()];
    const CallKey forth{int64_t(i), kForwardSite}, back{int64_t(i), kBackwardSite};
    CHECK(forward(group, forth, p, p.shape(group.ranks()), rank, &(*results)[i]).ok(), "forward " + num(int64_t(i)));
    CHECK(backward(group, back, p, p.shape(group.ranks()), rank, &(*results)[i]).ok(), "backward " + num(int64_t(i)));
    if (i % 5 == size_t(rank)) group.release();
  }
}

void change_shapes(Group& group, int32_t first, int32_t count) {
  constexpr size_t kCalls = 30;
  std::vector<Problem> problems;
  for (int i = 0; i < 4; ++i)
    problems.push_back(make_problem({"changing", 12, 2, 24 * (1 + (i * 3) % 4), 10 + 9 * i, 8 + 5 * i, 0, Ids::with_none},
                                    i % 2 ? 2 : 4, uint64_t(80 + i)));
  std::vector<Results> results, wanted;
  Group alone(1);
  for (const Problem& p : problems) wanted.push_back(run_layer(alone, p, {}));
  for (size_t i = 0; i < kCalls; ++i) results.emplace_back(problems[i % problems.size()], group.ranks());
  std::vector<std::thread> threads;
  for (int32_t r = first; r < first + count; ++r)
    threads.emplace_back([&, r] { run_changing_shapes(group, r, &results, problems); });
  for (auto& t : threads) t.join();
  for (size_t i = 0; i < kCalls; ++i) {
    const Problem& p = problems[i % problems.size()];
    const Results& want = wanted[i % problems.size()];
    const int64_t bytes = p.shape(group.ranks()).tokens * p.c.hidden * p.elem, at = first * bytes / p.elem;
    CHECK(std::memcmp(results[i].y.at(at), want.y.at(at), size_t(count * bytes)) == 0, "y of call " + num(int64_t(i)));
    CHECK(std::memcmp(results[i].dx.at(at), want.dx.at(at), size_t(count * bytes)) == 0, "dx of call " + num(int64_t(i)));
  }
}

int run_member(char** args) {
  const std::string handle = args[0], scenario = args[1];
  const int32_t first = std::atoi(args[2]), count = std::atoi(args[3]), victim = std::atoi(args[4]);
  const Stage stage = Stage(std::atoi(args[5]));
  if (scenario == "shapes") {
    change_shapes(*Group::join(4, kGroupName, handle), first, count);
    return 0;
  }
  const auto group = Group::join(kMembers, kGroupName, handle);
  const End end = scenario == "killed" ? End::killed : scenario == "stopped" ? End::stopped : End::absent;
  meet_an_end(*group, first, victim, stage, end);
  return 0;
}

// ---- the parent's side ----

pid_t start_member(const std::string& handle, const char* scenario, int32_t first, int32_t count, int32_t victim,
                   Stage stage) {
  const std::string numbers[] = {num(first), num(count), num(victim), num(int64_t(stage))};
  const pid_t pid = fork();
  CHECK(pid >= 0, "fork");
  if (pid == 0) {
    execl("/proc/self/exe", "cpu_test", "--member", handle.c_str(), scenario, numbers[0].c_str(), numbers[1].c_str(),
          numbers[2].c_str(), numbers[3].c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  return pid;
}

// How a process ended; one that has not within a minute hangs.
int wait_for(pid_t pid, const std::string& where) {
  for (int tries = 0; tries < 6000; ++tries) {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) return status;
    sleep_ms(10);
  }
  kill(pid, SIGKILL);
  CHECK(false, "a process hangs: " + where);
  return 0;
}

int count_entries(const char* directory) {
  int n = 0;
  DIR* const dir = opendir(directory);
  if (dir == nullptr) return 0;
  while (readdir(dir) != nullptr) ++n;
  closedir(dir);
  return n;
}

void play(const char* scenario, int32_t victim, Stage stage, bool must_die) {
  const auto group = Group::found(kMembers, kGroupName);
  const std::string where = std::string(scenario) + ", victim " + num(victim) + ", stage " + num(int64_t(stage));
  std::vector<pid_t> pids;
  for (int32_t r = 0; r < kMembers; ++r) pids.push_back(start_member(group->handle(), scenario, r, 1, victim, stage));
  for (int32_t r = 0; r < kMembers; ++r)
    if (r != victim) CHECK(wait_for(pids[size_t(r)], where) == 0, "rank " + num(r) + " of " + where);
  if (!must_die) kill(pids[size_t(victim)], SIGKILL);
  const int status = wait_for(pids[size_t(victim)], where);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "how the victim ended: " + num(status) + ", " + where);
}

// Every rank at every stage, twice: 48 rounds.
void test_killed_processes() {
  const int files = count_entries("/proc/self/fd"), names = count_entries("/dev/shm");
  for (int round = 0; round < 2; ++round)
    for (int stage = 0; stage < int(Stage::count); ++stage)
      for (int32_t victim = 0; victim < kMembers; ++victim) play("killed", victim, Stage(stage), true);
  CHECK(count_entries("/proc/self/fd") == files, "file descriptors leak");
  CHECK(count_entries("/dev/shm") == names, "shared memory has names");
}

void test_stopped_and_absent_processes() {
  play("stopped", 0, Stage::gate_up, false);
  play("stopped", 2, Stage::backward_combine, false);
  play("absent", 1, Stage::routing, false);
}

void test_changing_shapes_across_processes() {
  for (int32_t per_process : {1, 2}) {
    const auto group = Group::found(4, kGroupName);
    std::vector<pid_t> pids;
    for (int32_t r = 0; r < 4; r += per_process)
      pids.push_back(start_member(group->handle(), "shapes", r, per_process, -1, Stage::count));
    for (pid_t pid : pids) CHECK(wait_for(pid, "changing shapes") == 0, num(per_process) + " ranks per process");
  }
}

// A process that dies with the lock of the group leaves it to the others.
void test_lock_of_a_dead_process() {
#if defined(__SANITIZE_THREAD__)
  return;  // it takes a timed lock that comes from a dead holder for none (GCC 12), and the unlock for a fault
#endif
  Control control(2, SharedFile::create("test"), 7, true);
  const pid_t pid = fork();
  if (pid == 0) {
    control.lock();
    kill(getpid(), SIGKILL);
  }
  wait_for(pid, "the lock's holder");
  for (int i = 0; i < 2; ++i) {
    const auto start = std::chrono::steady_clock::now();
    CHECK(control.lock(), "the lock of a dead process");
    control.unlock();
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2), "the lock comes soon");
  }
}

template <class Body>
void expect_refusal(const char* words, Body body) {
  try {
    body();
  } catch (const std::exception& e) {
    CHECK(std::string(e.what()).find(words) != std::string::npos, e.what());
    return;
  }
  CHECK(false, std::string("no refusal: ") + words);
}

void test_joining() {
  const auto group = Group::found(3, kGroupName);
  const std::string handle = group->handle();
  CHECK(Group::is_own(handle) && !Group::is_own("elsewhere 1 3 4 5"), "whose handle it is");
  expect_refusal("another group", [&] { Group::join(3, "another name", handle); });
  expect_refusal("not that of this group", [&] { Group::join(40, kGroupName, handle); });
  expect_refusal("another host", [&] { Group::join(3, kGroupName, "elsewhere 1 3 4 5"); });
  expect_refusal("is not the handle", [&] { Group::join(3, kGroupName, "nonsense"); });
  const std::string host = handle.substr(0, handle.find(' '));
  const SharedFile other = SharedFile::create("something else");
  const std::string last = handle.substr(handle.rfind(' '));
  const std::string foreign = host + " " + num(getpid()) + " " + num(other.descriptor()) + last + last;
  CHECK(Group::join(3, kGroupName, host + " 99999999 3 4 5") == nullptr, "the founder is gone");
  expect_refusal("not that of this group", [&] { Group::join(3, kGroupName, foreign); });

  // The board of a job: rank 0 posts, the others read; another job knows nothing of this one's groups.
  std::map<std::string, std::string> texts;
  auto post = [&](const std::string& name, const std::string& text) { texts[name] = text; };
  auto read = [&](const std::string& name, double) {
    return texts.count(name) ? std::make_unique<std::string>(texts[name]) : nullptr;
  };
  set_board({post, read});
  const GroupName name{"board/0", 2, true};
  CHECK(get_group(name, 1, 0.1) == nullptr, "nobody has posted the group");
  const auto mine = get_group(name, 0, 0.1);
  CHECK(get_group(name, 1, 0.1) == mine && get_group(name, 0, 0.1) == mine && texts.size() == 1, "found by its name");
  texts.clear();
  set_board({post, read});
  CHECK(get_group(name, 1, 0.1) == nullptr && get_group(name, 0, 0.1) != mine, "another job");
}

// Two processes that claim the same rank: an error, not a mixture.
void test_a_rank_in_two_processes() {
  const auto one = Group::found(2, kGroupName), two = Group::join(2, kGroupName, one->handle());
  const Problem p = small_problem();
  const ArenaLayout need = arena_layout(p.shape(2), kTiles);
  const Entrance first(*one, 0, {1, kForwardSite}, need, 0.1);
  CHECK(!first.abandoned(), "the first to come");
  const Entrance second(*two, 0, {1, kForwardSite}, need, 0.1);
  CHECK(second.abandoned() && second.why().code == Code::shape_mismatch && second.why().rank == 0, text(second.why()));
}

void test_run_names() {
  std::vector<uint64_t> memory(size_t(RunNames::bytes()) / 8);
  RunNames a(reinterpret_cast<uint8_t*>(memory.data())), b(reinterpret_cast<uint8_t*>(memory.data()));
  auto name = [](RunNames& names, int64_t run, uint64_t site) {
    CallKey key{run, site};
    return names.translate(&key) ? key.run : -1;
  };
  CHECK(name(a, 101, 7) == 101 && name(a, 100, 7) == 100, "the names of the first to come");
  CHECK(name(b, 100, 7) == 100 && name(b, 101, 7) == 101, "are those of everybody, in any order");
  CHECK(name(a, 200, 8) == 200 && name(b, 900000, 8) == 200 && name(b, 900003, 8) == 203, "or are translated");
  CHECK(name(b, 899999, 8) == -1 && name(a, 199, 8) == -1, "unless the first run was not the first");
  for (uint64_t site = 100; site < 5000; ++site)
    CHECK(name(a, 5, site) == 5 && name(b, 6, site) == 6, "more sites than are remembered");
  CHECK(name(b, 900004, 8) == 204, "what was agreed stays");
}

}  // namespace
}  // namespace mok::cpu
