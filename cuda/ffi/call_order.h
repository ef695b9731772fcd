// The order of calls on the GPUs of a process, and what failed calls have left behind in host memory.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "../device/params.h"

namespace mok::ffi {

// A call of a compiled program: an address of its own, and a number that is the same in all processes.
struct SiteKey {
  const void* address;
  uint64_t number;
};

class CallOrder {
 public:
  // A seat's call. Failures up to `acknowledged` have been raised. `stamp`: of the site and of how often it was called, by
  // which ranks of several processes see whether they are in the same call.
  struct Place {
    uint64_t generation;
    uint64_t acknowledged;
    Status raise;
    uint64_t stamp;
  };

  // Where seats are of several processes, these hear of a failed call at different times. Takes the number of the
  // question and the next call of this process; returns the latest of what all processes said, 0: one did not answer.
  using Agree = std::function<uint64_t(uint64_t round, uint64_t next)>;

  CallOrder(HostStatus* statuses, int32_t seats, Agree agree = nullptr)
      : statuses_(statuses), seats_(seats), agree_(std::move(agree)), raised_(size_t(seats)) {}

  // The first seat that comes with a key gives it the next generation. A key is the XLA run and the call site; a seat
  // may come with the same key again (a loop), and each time is a call of its own. Kernels cannot raise, so a call
  // raises what an earlier one left behind: the first seat decides, and all seats of the call raise the same, for a
  // device that does not run its program must not leave its peers waiting, in this layer or in a collective of XLA's.
  // With seats of other processes, which must all make the same calls in the same order, a failure that all ranks have
  // judged alike is raised by all in a call that they agree on; any other one is the end: every later call raises it.
  // `alone`: the program runs on no other device, and raises what this one left behind.
  Place enter(int32_t seat, int64_t run, const SiteKey& site, bool alone = false);
  // What a kernel does when its call fails, for calls that have none.
  void leave_behind(int32_t seat, uint64_t generation, const Status& why);
  // What an earlier call left behind, for an only seat without peers, all of whose calls have generation 1.
  Status take_failure(int32_t seat);
  // Of seats of several processes: looks for a failure, and agrees on when to raise it. To be called again and again by a
  // thread that waits for nothing else: the other processes wait for the answer, and so does every new call here.
  void watch();

 private:
  using Key = std::pair<int64_t, const void*>;  // run, site
  struct Calls {
    std::deque<Place> places;
    size_t forgotten = 0;         // earlier ones
    std::vector<size_t> entered;  // by each seat, up to the last that has
  };

  const Place* find(int32_t seat, const Key& key);
  const Place* start(int32_t seat, const Key& key, const SiteKey& site, bool alone);
  void wait_for_agreement(std::unique_lock<std::mutex>& lock);
  bool is_unraised(int32_t seat) const;
  const HostStatus* unraised() const;
  Place next_place(int32_t seat, int64_t run, const SiteKey& site, bool alone);
  void mark_raised(int32_t seat, uint64_t generation);

  HostStatus* const statuses_;
  const int32_t seats_;
  const Agree agree_;
  std::mutex mutex_;
  std::condition_variable decided_;
  std::map<Key, Calls> calls_;
  std::deque<Key> started_;              // of all calls that are kept, the oldest first
  std::map<uint64_t, uint64_t> visits_;  // by number of the site
  std::vector<uint64_t> raised_;         // by seat: what it left behind up to this generation; without agree_
  std::pair<int64_t, Status> ending_;    // the last run that raised; its devices may come to their calls in any order
  uint64_t last_generation_ = 0, acknowledged_ = 0;
  uint64_t rounds_ = 0, raise_in_ = 0;       // raise_in_: the call that raises, once that is agreed on
  bool asking_ = false, ended_ = false;      // ended_: nothing more will run
};

}  // namespace mok::ffi
