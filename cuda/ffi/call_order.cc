#include "call_order.h"

#include <algorithm>
#include <chrono>
#include <exception>

namespace mok::ffi {
namespace {

constexpr auto kLongestAgreement = std::chrono::seconds(20);  // above that of the question itself
constexpr size_t kCallsKept = 1 << 14;  // ranks leave a call together, so none is ever that far behind

// Filled in by a kernel, the code last.
uint64_t code_of(const HostStatus& status) { return __atomic_load_n(&status.code, __ATOMIC_ACQUIRE); }
void forget(HostStatus& status) { __atomic_store_n(&status.code, uint64_t{0}, __ATOMIC_RELEASE); }
Status failure_of(const HostStatus& status) {
  return {Code(code_of(status)), int32_t(status.rank), status.value, status.extra};
}
// By every rank of the group, from what it read of the others.
bool is_judged(Code code) { return code == Code::id_out_of_range || code == Code::over_capacity; }

}  // namespace

bool CallOrder::is_unraised(int32_t seat) const {
  const HostStatus& s = statuses_[seat];
  return code_of(s) != 0 && s.generation > (agree_ ? acknowledged_ : raised_[size_t(seat)]);
}

// The oldest failure that has not been raised.
const HostStatus* CallOrder::unraised() const {
  const HostStatus* oldest = nullptr;
  for (int32_t i = 0; i < seats_; ++i)
    if (is_unraised(i) && (oldest == nullptr || statuses_[i].generation < oldest->generation)) oldest = &statuses_[i];
  return oldest;
}

void CallOrder::mark_raised(int32_t seat, uint64_t generation) {
  raised_[size_t(seat)] = std::max(raised_[size_t(seat)], generation);
}

CallOrder::Place CallOrder::next_place(int32_t seat, int64_t run, const SiteKey& site, bool alone) {
  const uint64_t next = ++last_generation_, stamp = site.number * 0x9e3779b97f4a7c15ull + ++visits_[site.number];
  if (!agree_ && !ending_.second.ok() && ending_.first == run) return {next, acknowledged_, ending_.second, stamp};
  const HostStatus* const failed = !alone ? unraised() : is_unraised(seat) ? &statuses_[seat] : nullptr;
  // before the call that raises: it ends at once, for the device knows of the failure
  if (failed == nullptr || (agree_ && !ended_ && next < raise_in_)) return {next, acknowledged_, {}, stamp};
  const Status raise = failure_of(*failed);
  if (ended_) return {next, acknowledged_, raise, stamp};
  raise_in_ = 0;
  acknowledged_ = next - 1;  // in all processes alike
  if (!agree_) {
    ending_ = {run, raise};
    for (int32_t i = 0; i < seats_; ++i)
      if (is_unraised(i) && (!alone || i == seat)) mark_raised(i, statuses_[i].generation);
  }
  return {next, acknowledged_, raise, stamp};
}

// The call that the seat has come to, if a peer has started it.
const CallOrder::Place* CallOrder::find(int32_t seat, const Key& key) {
  const auto it = calls_.find(key);
  if (it == calls_.end()) return nullptr;
  const Calls& calls = it->second;
  const size_t entered = size_t(seat) < calls.entered.size() ? calls.entered[size_t(seat)] : 0;
  const size_t i = std::max(entered, calls.forgotten) - calls.forgotten;
  return i < calls.places.size() ? &calls.places[i] : nullptr;
}

const CallOrder::Place* CallOrder::start(int32_t seat, const Key& key, const SiteKey& site, bool alone) {
  started_.push_back(key);
  Calls& calls = calls_[key];
  calls.places.push_back(next_place(seat, key.first, site, alone));
  if (started_.size() > kCallsKept) {
    const auto oldest = calls_.find(started_.front());
    started_.pop_front();
    oldest->second.places.pop_front();
    ++oldest->second.forgotten;
    if (oldest->second.places.empty()) calls_.erase(oldest);
  }
  return &calls.places.back();
}

// A failure that this process knows of has a call that raises it before another call starts.
void CallOrder::wait_for_agreement(std::unique_lock<std::mutex>& lock) {
  auto settled = [&] { return !asking_ && (ended_ || raise_in_ != 0 || unraised() == nullptr); };
  if (settled()) return;
  if (!asking_) ended_ = !is_judged(failure_of(*unraised()).code);
  if (!ended_ && !decided_.wait_for(lock, kLongestAgreement, settled)) ended_ = true;  // nobody watches any more
}

CallOrder::Place CallOrder::enter(int32_t seat, int64_t run, const SiteKey& site, bool alone) {
  std::unique_lock<std::mutex> lock(mutex_);
  const Key key{run, site.address};
  const Place* found = find(seat, key);
  if (found == nullptr && agree_) {
    wait_for_agreement(lock);
    found = find(seat, key);  // a peer of this process may have been faster
  }
  const Place place = found != nullptr ? *found : *start(seat, key, site, alone);
  Calls& calls = calls_.at(key);
  calls.entered.resize(std::max(calls.entered.size(), size_t(seat) + 1));
  size_t& entered = calls.entered[size_t(seat)];
  entered = std::max(entered, calls.forgotten) + 1;
  // whatever of this seat's still fails of the calls before has been raised with the rest
  if (!place.raise.ok()) mark_raised(seat, place.generation - 1);
  if (code_of(statuses_[seat]) != 0 && !ended_ && !is_unraised(seat)) forget(statuses_[seat]);
  return place;
}

void CallOrder::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  const HostStatus* const failed = unraised();
  if (failed == nullptr || ended_ || raise_in_ != 0) return;
  ended_ = !is_judged(failure_of(*failed).code);
  if (ended_) return decided_.notify_all();
  asking_ = true;
  const uint64_t round = ++rounds_, next = last_generation_ + 1;
  lock.unlock();
  uint64_t latest = 0;
  try {
    latest = agree_(round, next);
  } catch (const std::exception&) {  // as if somebody did not answer
  }
  lock.lock();
  raise_in_ = latest;
  ended_ = ended_ || latest == 0;
  asking_ = false;
  decided_.notify_all();
}

void CallOrder::leave_behind(int32_t seat, uint64_t generation, const Status& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  HostStatus& s = statuses_[seat];
  if (is_unraised(seat)) return;
  s.generation = generation;
  s.rank = why.rank;
  s.value = why.value;
  s.extra = why.extra;
  __atomic_store_n(&s.code, uint64_t(why.code), __ATOMIC_RELEASE);
}

Status CallOrder::take_failure(int32_t seat) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (code_of(statuses_[seat]) == 0) return {};
  const Status status = failure_of(statuses_[seat]);
  forget(statuses_[seat]);
  return status;
}

}  // namespace mok::ffi
