// The order of calls on the GPUs of a process, and what failed calls have left behind in host memory.
#pragma once

#include <cstdint>
#include <deque>
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

  CallOrder(HostStatus* statuses, int32_t seats) : statuses_(statuses), seats_(seats) {}

  // The first seat that comes with a key gives it the next generation. A key is the XLA run and the call site; a seat may
  // come with the same key again (a loop), and each time is a call of its own. Kernels cannot raise, so a call raises
  // what an earlier one left behind: the first seat decides, and all seats of the call raise the same, for a rank that
  // does not launch must not leave its peers waiting.
  Place enter(int32_t seat, int64_t run, const void* site);
  // What a seat's earlier call left behind, for a call without peers. Such calls have no generation: it is 0.
  Status take_failure(int32_t seat);

 private:
  struct Call {
    Place place;
    int64_t run;
    const void* site;
    std::vector<bool> entered;
  };

  Place next_place();

  HostStatus* const statuses_;
  const int32_t seats_;
  std::mutex mutex_;
  std::deque<Call> calls_;
  uint64_t last_generation_ = 0, acknowledged_ = 0;
};

}  // namespace mok::ffi
