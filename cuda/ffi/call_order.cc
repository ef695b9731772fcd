#include "call_order.h"

#include <algorithm>
#include <iterator>

namespace mok::ffi {
namespace {

constexpr size_t kCallsKept = 1 << 14;  // ranks leave a call together, so none is ever that far behind

// Filled in by a kernel, the code last.
uint64_t code_of(const HostStatus& status) { return __atomic_load_n(&status.code, __ATOMIC_ACQUIRE); }
void forget(HostStatus& status) { __atomic_store_n(&status.code, uint64_t{0}, __ATOMIC_RELEASE); }
Status failure_of(const HostStatus& status) {
  return {Code(code_of(status)), int32_t(status.rank), status.value, status.extra};
}

}  // namespace

uint64_t CallOrder::agree_on(const HostStatus& failure, uint64_t next, double patience_s) const {
  const Code code = failure_of(failure).code;
  const bool judged = code == Code::id_out_of_range || code == Code::over_capacity || code == Code::shape_mismatch;
  return judged ? agree_(failure.generation, next, patience_s) : 0;
}

// With the oldest failure that has not been raised.
CallOrder::Place CallOrder::next_place(double patience_s) {
  const HostStatus* oldest = nullptr;
  uint64_t newest = acknowledged_;
  for (const HostStatus* s = statuses_; s < statuses_ + seats_; ++s) {
    if (code_of(*s) == 0 || (s->generation != 0 && s->generation <= acknowledged_)) continue;
    if (oldest == nullptr || s->generation < oldest->generation) oldest = s;
    newest = std::max(newest, s->generation);
  }
  const uint64_t next = ++last_generation_;
  if (oldest == nullptr) return {next, acknowledged_, {}};
  if (agree_ && !ended_) {
    if (raise_in_ == 0) raise_in_ = agree_on(*oldest, next, patience_s);
    ended_ = raise_in_ == 0;
    if (next < raise_in_) return {next, acknowledged_, {}};  // it will end at once: the device knows of the failure
    raise_in_ = 0;
  }
  if (!ended_) acknowledged_ = newest;
  return {next, acknowledged_, failure_of(*oldest)};
}

CallOrder::Place CallOrder::enter(int32_t seat, int64_t run, const void* site, double patience_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = std::find_if(calls_.begin(), calls_.end(), [&](const Call& c) {
    return c.run == run && c.site == site && !c.entered[size_t(seat)];
  });
  if (it == calls_.end()) {
    calls_.push_back({next_place(patience_s), run, site, std::vector<bool>(size_t(seats_))});
    if (calls_.size() > kCallsKept) calls_.pop_front();
    it = std::prev(calls_.end());
  }
  it->entered[size_t(seat)] = true;
  HostStatus& mine = statuses_[seat];
  const bool raised = mine.generation == 0 ? !it->place.raise.ok() : mine.generation <= acknowledged_;
  if (code_of(mine) != 0 && raised) forget(mine);
  return it->place;
}

Status CallOrder::take_failure(int32_t seat) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (code_of(statuses_[seat]) == 0) return {};
  const Status status = failure_of(statuses_[seat]);
  forget(statuses_[seat]);
  return status;
}

}  // namespace mok::ffi
