// The order of calls on GPUs, and how failures are raised. Part of cpu_test.cc.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <random>
#include <stdexcept>
#include <thread>

#include "../../cuda/ffi/call_order.h"
#include "check.h"

namespace mok::cpu {
namespace {

struct Seats {
  std::vector<HostStatus> statuses;
  ffi::CallOrder order;

  explicit Seats(int32_t n, ffi::CallOrder::Agree agree = nullptr)
      : statuses(size_t(n), HostStatus{}), order(statuses.data(), n, std::move(agree)) {}
  // What a kernel leaves behind.
  void fail(int32_t seat, uint64_t generation, Code code, int32_t rank) {
    HostStatus& s = statuses[size_t(seat)];
    s.rank = rank;
    s.value = 5;
    s.extra = 6;
    s.generation = generation;
    __atomic_store_n(&s.code, uint64_t(code), __ATOMIC_RELEASE);
  }
};

void test_call_order() {
  const ffi::SiteKey sites[2] = {{&sites[0], 1}, {&sites[1], 2}};
  Seats s(3);
  // by run and site, and a loop's second round is another call
  CHECK(s.order.enter(0, 7, sites[0]).generation == 1, "first call");
  CHECK(s.order.enter(0, 7, sites[1]).generation == 2, "another site");
  CHECK(s.order.enter(0, 7, sites[0]).generation == 3, "the same site again");
  CHECK(s.order.enter(1, 7, sites[0]).generation == 1, "a peer takes the calls in the same order");
  CHECK(s.order.enter(1, 7, sites[0]).generation == 3, "and its second round, too");
  CHECK(s.order.enter(1, 7, sites[1]).generation == 2, "whatever came between");
  CHECK(s.order.enter(1, 8, sites[1]).generation == 4, "another run");

  // one seat is told of its failure before, the other after the first seat of the next call came: all raise, once
  s.fail(0, 4, Code::id_out_of_range, 1);
  const auto first = s.order.enter(0, 9, sites[0]);
  CHECK(first.raise.code == Code::id_out_of_range && first.raise.rank == 1 && first.raise.value == 5, "raised");
  CHECK(first.acknowledged == first.generation - 1, "with all calls before");
  s.fail(1, 4, Code::id_out_of_range, 1);
  const auto second = s.order.enter(1, 9, sites[0]);
  CHECK(second.generation == first.generation && second.raise.code == Code::id_out_of_range, "by the peer, too");
  for (int32_t seat = 0; seat < 2; ++seat) {
    CHECK(s.order.enter(seat, 10, sites[0]).raise.ok(), "once");
    CHECK(s.statuses[size_t(seat)].code == 0, "and forgotten");
  }

  // a failure that comes to light after the first seat has entered waits for the next call
  CHECK(s.order.enter(0, 11, sites[0]).raise.ok(), "nothing yet");
  s.fail(1, 6, Code::peer_timeout, 2);
  CHECK(s.order.enter(1, 11, sites[0]).raise.ok(), "no rank raises alone");
  CHECK(s.order.enter(0, 12, sites[0]).raise.code == Code::peer_timeout, "all raise in the next call");
  CHECK(s.order.enter(1, 12, sites[0]).raise.code == Code::peer_timeout, "all raise in the next call");
  CHECK(s.order.enter(1, 13, sites[0]).raise.ok() && s.order.enter(0, 13, sites[0]).raise.ok(), "once");

  // a failed call without peers, on a device that takes no part in the next ones
  s.fail(2, s.order.enter(2, 14, sites[1]).generation, Code::over_capacity, 0);
  for (int32_t seat = 0; seat < 2; ++seat)
    CHECK(s.order.enter(seat, 15, sites[0]).raise.code == Code::over_capacity, "raised by all devices of a program");
  for (int32_t seat = 0; seat < 2; ++seat) CHECK(s.order.enter(seat, 16, sites[0]).raise.ok(), "once");
  CHECK(s.order.enter(2, 17, sites[1]).raise.ok() && s.statuses[2].code == 0, "and not by the device itself any more");

  // programs on one device tell their own failures only
  s.fail(1, s.order.enter(1, 18, sites[1]).generation, Code::over_capacity, 0);
  CHECK(s.order.enter(0, 19, sites[0], true).raise.ok(), "none of its own");
  CHECK(s.order.enter(1, 20, sites[0], true).raise.code == Code::over_capacity, "its own");
  CHECK(s.order.enter(1, 21, sites[0], true).raise.ok(), "once");
}

// What calls leave behind that were on their way when another one raised.
void test_failures_of_calls_on_their_way() {
  const ffi::SiteKey a{&a, 1}, b{&b, 2};
  Seats s(4);
  const uint64_t slow = s.order.enter(0, 1, a).generation, quick = s.order.enter(2, 2, b).generation;
  CHECK(s.order.enter(1, 1, a).generation == slow && s.order.enter(3, 2, b).generation == quick, "two programs");
  const uint64_t behind = s.order.enter(2, 2, a).generation;
  s.order.enter(3, 2, a);
  s.fail(2, quick, Code::id_out_of_range, 0);
  CHECK(s.order.enter(2, 3, b).raise.code == Code::id_out_of_range, "raised");
  CHECK(s.order.enter(2, 3, a).raise.code == Code::id_out_of_range, "by all calls of the run, in which order ever");
  CHECK(s.order.enter(3, 3, a).raise.code == Code::id_out_of_range, "on all its devices");
  s.fail(2, behind, Code::over_capacity, 0);
  s.fail(3, behind, Code::over_capacity, 0);
  CHECK(s.order.enter(2, 4, b).raise.ok() && s.order.enter(3, 4, b).raise.ok(), "what fails behind it is not told again");
  s.fail(0, slow, Code::peer_timeout, 1);
  CHECK(s.order.enter(0, 5, a).raise.code == Code::peer_timeout, "an older call of other devices is");
  CHECK(s.order.enter(1, 5, a).raise.code == Code::peer_timeout, "on all its devices");
  CHECK(s.order.enter(0, 6, a).raise.ok() && s.order.enter(1, 6, a).raise.ok(), "once");

  // an only seat without peers
  Seats alone(1);
  alone.fail(0, 1, Code::over_capacity, 0);
  CHECK(alone.order.take_failure(0).code == Code::over_capacity && alone.order.take_failure(0).ok(), "once");
}

// More calls than are kept, in programs that run once and in a loop that goes on: quick, and peers still find theirs.
void test_many_calls() {
  const ffi::SiteKey site{&site, 1}, loop{&loop, 2};
  Seats s(2);
  uint64_t generation = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t run = 0; run < 100000; ++run)
    for (const auto& key : {site, loop}) {
      const int64_t of = key.address == &loop ? -1 : run;
      const auto first = s.order.enter(0, of, key), second = s.order.enter(1, of, key);
      CHECK(first.generation == ++generation && second.generation == generation, "call " + num(generation));
    }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(seconds < 10, "a call takes microseconds, not " + std::to_string(seconds / 4e5));
  // a seat that is behind finds its calls in the order in which they were started
  std::deque<uint64_t> started;
  for (int i = 0; i < 5000; ++i) started.push_back(s.order.enter(0, 200000, loop).generation);
  for (uint64_t want : started) CHECK(s.order.enter(1, 200000, loop).generation == want, "behind");
}

// One process's part of seats that several share: seat 1 is another's.
void test_call_order_of_several_processes() {
  const ffi::SiteKey site{&site, 7};
  uint64_t asked = 0, asked_next = 0, answer = 0;
  Seats s(2, [&](uint64_t round, uint64_t next) {
    asked = round;
    asked_next = next;
    return answer == 0 ? 0 : std::max(answer, next);
  });
  auto enter = [&] { return s.order.enter(0, 1, site); };
  s.order.watch();
  CHECK(enter().generation == 1 && enter().generation == 2 && asked == 0, "nothing to agree on");
  s.fail(0, 1, Code::id_out_of_range, 1);
  answer = 6;  // the other process is three calls ahead
  s.order.watch();
  CHECK(asked == 1 && asked_next == 3, "the first question");
  for (int call = 3; call < 6; ++call) CHECK(enter().acknowledged == 0, "not yet");
  s.order.watch();
  CHECK(asked == 1, "they are asked once");
  s.fail(1, 3, Code::over_capacity, 0);  // comes to light here before that call, in another process after it
  const auto raised = enter();
  CHECK(raised.generation == 6 && raised.raise.code == Code::id_out_of_range && raised.acknowledged == 5, "together");
  s.order.watch();
  CHECK(enter().raise.ok() && s.statuses[0].code == 0 && asked == 1, "once");
  s.fail(0, 7, Code::over_capacity, 1);
  answer = 1;  // the other is behind
  s.order.watch();
  CHECK(asked == 2 && enter().raise.code == Code::over_capacity && enter().raise.ok(), "at once");

  s.fail(0, 9, Code::peer_timeout, 1);
  for (int i = 0; i < 3; ++i) CHECK(enter().raise.code == Code::peer_timeout, "the end");
  s.order.watch();
  CHECK(asked == 2, "nobody is asked who may be dead");

  for (const bool throws : {false, true}) {
    Seats alone(2, [=](uint64_t, uint64_t) -> uint64_t {
      if (throws) throw std::runtime_error("no key-value store");
      return 0;
    });
    CHECK(alone.order.enter(0, 1, site).generation == 1, "first call");
    alone.fail(0, 1, Code::id_out_of_range, 0);
    alone.order.watch();
    for (int i = 0; i < 3; ++i) CHECK(alone.order.enter(0, 1, site).raise.code == Code::id_out_of_range, "no answer: the end");
  }
}

// A seat that catches up with a call passes while the processes agree, and a new call waits for what they say.
void test_no_call_starts_before_processes_agree() {
  const ffi::SiteKey site{&site, 7};
  std::promise<void> asked, answered;
  Seats s(2, [&](uint64_t, uint64_t next) {
    asked.set_value();
    answered.get_future().wait();
    return next;
  });
  CHECK(s.order.enter(0, 1, site).generation == 1, "first call");
  s.fail(0, 1, Code::id_out_of_range, 0);
  auto next = std::async(std::launch::async, [&] { return s.order.enter(0, 2, site); });
  CHECK(next.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout, "waits to be asked");
  std::thread watcher([&] { s.order.watch(); });
  asked.get_future().wait();
  CHECK(s.order.enter(1, 1, site).generation == 1, "its peer in the same call");
  CHECK(next.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout, "waits for the answer");
  answered.set_value();
  CHECK(next.get().raise.code == Code::id_out_of_range, "raises what was agreed on");
  watcher.join();
}

// Where the processes of a job meet to answer a question.
class Meeting {
 public:
  explicit Meeting(int processes) : processes_(processes) {}
  uint64_t latest(uint64_t round, uint64_t next) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& [answers, latest] = rounds_[round];
    latest = std::max(latest, next);
    ++answers;
    all_.notify_all();
    const bool answered = all_.wait_for(lock, std::chrono::seconds(10), [&] { return rounds_[round].first == processes_; });
    return answered ? rounds_[round].second : 0;
  }

 private:
  const int processes_;
  std::mutex mutex_;
  std::condition_variable all_;
  std::map<uint64_t, std::pair<int, uint64_t>> rounds_;
};

// A process: its host makes calls and may be far ahead of its GPU, which does them in order.
class JobProcess {
 public:
  JobProcess(Meeting& meeting, unsigned seed)
      : random_(seed), seats_(1, [&](uint64_t round, uint64_t next) { return meeting.latest(round, next); }) {}

  // Programs of three calls each; every ninth call has bad ids. A raised call ends its program.
  void run(int programs) {
    std::thread gpu([&] { work(); }), watcher([&] {
      while (!done_) {
        seats_.order.watch();
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      seats_.order.watch();
    });
    const ffi::SiteKey site{this, 7};
    for (int p = 0; p < programs; ++p) {
      if (random_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
      if (random_() % 3 == 0) wait_for_gpu();
      for (int call = 0; call < 3; ++call) {
        const auto place = seats_.order.enter(0, p, site);
        if (!place.raise.ok()) {
          raised.push_back(place.generation);
          break;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        launched.push_back({place.generation, place.acknowledged});
        changed_.notify_all();
      }
    }
    wait_for_gpu();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // for those that still ask
    done_ = true;
    changed_.notify_all();
    gpu.join();
    watcher.join();
  }

  std::vector<uint64_t> raised;
  std::vector<std::pair<uint64_t, uint64_t>> launched;  // generation, acknowledged

 private:
  void wait_for_gpu() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return worked_ == launched.size(); });
  }
  void work() {
    std::mt19937 random(42);
    for (std::unique_lock<std::mutex> lock(mutex_);; ++worked_, changed_.notify_all()) {
      changed_.wait(lock, [&] { return done_ || worked_ < launched.size(); });
      if (worked_ == launched.size()) return;
      const auto [generation, acknowledged] = launched[worked_];
      if (last_failed_ > acknowledged) continue;  // skipped
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      if (generation % 9 == 5) {
        last_failed_ = generation;
        seats_.fail(0, generation, Code::id_out_of_range, 0);
      }
      lock.lock();
    }
  }

  std::mt19937 random_;
  Seats seats_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t worked_ = 0;
  uint64_t last_failed_ = 0;
  std::atomic<bool> done_{false};
};

void test_processes_raise_in_the_same_calls() {
  for (int processes : {2, 3}) {
    Meeting meeting(processes);
    std::deque<JobProcess> job;
    for (int p = 0; p < processes; ++p) job.emplace_back(meeting, unsigned(p));
    std::vector<std::thread> threads;
    for (auto& process : job) threads.emplace_back([&] { process.run(60); });
    for (auto& thread : threads) thread.join();
    for (auto& process : job) {
      CHECK(process.raised == job[0].raised, "raised in the same calls");
      CHECK(process.launched == job[0].launched, "the same calls, which know of the same failures");
    }
    CHECK(job[0].raised.size() >= 5, "there were failures: " + num(job[0].raised.size()));
  }
}

void test_stamps_of_calls() {
  const ffi::SiteKey a{&a, 7}, b{&b, 8};
  Seats here(1), there(1);
  const uint64_t first = here.order.enter(0, 1, a).stamp, second = here.order.enter(0, 2, a).stamp;
  CHECK(first == there.order.enter(0, 5, a).stamp && second == there.order.enter(0, 6, a).stamp, "the same in all processes");
  CHECK(first != second && second != here.order.enter(0, 3, b).stamp, "of one call only");
}

}  // namespace
}  // namespace mok::cpu
