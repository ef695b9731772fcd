// A deadline that starts anew while anything moves.
#pragma once

#include <chrono>
#include <cstdint>

namespace mok::cpu {

class Patience {
 public:
  explicit Patience(double seconds)
      : limit_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}

  // Whether `progress` has been the same for longer than the limit. The first question starts the clock.
  bool is_out(uint64_t progress) {
    const auto now = Clock::now();
    if (asked_ && progress == seen_) return now > deadline_;
    asked_ = true;
    seen_ = progress;
    deadline_ = now + limit_;
    return false;
  }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::duration limit_;
  Clock::time_point deadline_{};
  uint64_t seen_ = 0;
  bool asked_ = false;
};

}  // namespace mok::cpu
