// The order of calls on the GPUs of a process, and what failed calls have left behind in host memory.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "../device/params.h"

namespace mok::ffi {

class CallOrder {
 public:
  // A seat's call. Failures up to `acknowledged` have been raised.
  struct Place {
    uint64_t generation;
    uint64_t acknowledged;
    Status raise;
  };

  // Where seats are of several processes, these may hear of a failed call at different times. Takes its generation, the
  // next call of this process and for how long to wait for the others; returns the latest of what all of them said, in
  // which all raise. 0: somebody did not answer.
  using Agree = std::function<uint64_t(uint64_t failed, uint64_t next, double patience_s)>;

  CallOrder(HostStatus* statuses, int32_t seats, Agree agree = nullptr)
      : statuses_(statuses), seats_(seats), agree_(std::move(agree)) {}

  // The first seat that comes with a key gives it the next generation. A key is the XLA run and the call site; a seat may
  // come with the same key again (a loop), and each time is a call of its own. Kernels cannot raise, so a call raises
  // what an earlier one left behind: the first seat decides, and all seats of the call raise the same, for a rank that
  // does not launch must not leave its peers waiting. With seats of other processes, which must all make the same calls in
  // the same order, a failure that all ranks have judged alike is raised by all in a call that they agree on; any other
  // one is the end: every later call raises it.
  Place enter(int32_t seat, int64_t run, const void* site, double patience_s = 0);
  // What a seat's earlier call left behind, for a call without peers. Such calls have no generation: it is 0.
  Status take_failure(int32_t seat);

 private:
  struct Call {
    Place place;
    int64_t run;
    const void* site;
    std::vector<bool> entered;
  };

  Place next_place(double patience_s);
  uint64_t agree_on(const HostStatus& failure, uint64_t next, double patience_s) const;

  HostStatus* const statuses_;
  const int32_t seats_;
  const Agree agree_;
  std::mutex mutex_;
  std::deque<Call> calls_;
  uint64_t last_generation_ = 0, acknowledged_ = 0;
  uint64_t raise_in_ = 0;  // the call that raises what has failed, once that is agreed on
  bool ended_ = false;     // nothing more will run
};

}  // namespace mok::ffi
