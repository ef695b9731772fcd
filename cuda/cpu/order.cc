#include "order.h"

#include <cstring>
#include <initializer_list>

#include "../core/types.h"

namespace mok::cpu {
namespace {

constexpr uint64_t kCalls = 4096;      // that may be under way at once
constexpr uint64_t kRemembered = 256;  // calls for which an abandoned one is remembered, for ranks that come very late
constexpr uint64_t kSites = 1024;      // call sites whose first run is remembered, the newest ones
constexpr int64_t kFewRuns = 1024;     // by which processes may be apart
constexpr int64_t kHeader = 64;

int64_t stride(int32_t ranks) { return align_up(int64_t(sizeof(Order::Call)) + ranks, 8); }

}  // namespace

int64_t RunNames::bytes() { return kHeader + int64_t(kSites * sizeof(Site)); }

RunNames::Site& RunNames::at(uint64_t index) {
  return reinterpret_cast<Site*>(memory_ + kHeader)[index % kSites];
}

uint64_t RunNames::find_or_add(const CallKey& key) {
  const uint64_t added = state().added;
  for (uint64_t i = added > kSites ? added - kSites : 0; i < added; ++i)
    if (at(i).site == key.site) return i;
  at(added) = {key.site, key.run, 0};
  state().added = added + 1;
  return added;
}

bool RunNames::translate(CallKey* key) {
  auto it = own_.find(key->site);
  if (it == own_.end()) {
    const uint64_t index = find_or_add(*key);
    const int64_t offset = at(index).first - key->run;
    const bool same_names = offset > -kFewRuns && offset < kFewRuns;
    if (!same_names) at(index).translated = 1;
    it = own_.emplace(key->site, Own{key->run, same_names ? 0 : offset, index}).first;
  }
  const Own& own = it->second;
  const Site& site = at(own.index);
  const bool first_matters = own.offset != 0 || (site.site == key->site && site.translated != 0);
  if (first_matters && key->run < own.first) return false;
  key->run += own.offset;
  return true;
}

int64_t Order::bytes(int32_t ranks) { return kHeader + int64_t(kCalls) * stride(ranks); }

Order::Call& Order::at(uint64_t generation) {
  return *reinterpret_cast<Call*>(memory_ + kHeader + int64_t(generation % kCalls) * stride(ranks_));
}

Order::Seat& Order::seat(uint64_t generation, int32_t rank) {
  return reinterpret_cast<Seat*>(&at(generation) + 1)[rank];
}

Order::Call* Order::take_seat(int32_t rank, CallKey key, uint64_t need) {
  State& s = state();
  for (uint64_t g = s.oldest + 1; g <= s.last; ++g) {
    if (!(at(g).key == key) || seat(g, rank) != Seat::absent) continue;
    seat(g, rank) = Seat::inside;
    return &at(g);
  }
  if (s.last - s.oldest == kCalls) return nullptr;
  const uint64_t g = s.last + 1;
  at(g) = {g, key, need, 0};
  std::memset(&seat(g, 0), int(Seat::absent), size_t(ranks_));
  seat(g, rank) = Seat::inside;
  s.last = g;
  return &at(g);
}

Order::Call* Order::find(uint64_t generation) {
  const State& s = state();
  return generation > s.oldest && generation <= s.last ? &at(generation) : nullptr;
}

void Order::leave(int32_t rank, uint64_t generation) {
  if (find(generation) != nullptr) seat(generation, rank) = Seat::left;
  forget();
}

bool Order::is_turn(int32_t rank, uint64_t generation, bool alone) {
  for (uint64_t g = state().oldest + 1; g < generation; ++g) {
    const Seat mine = seat(g, rank);
    if (mine == Seat::inside || (mine == Seat::absent && !at(g).abandoned())) return false;
    if (alone && !settled(g)) return false;
  }
  return true;
}

int32_t Order::blocker(int32_t rank, uint64_t generation) {
  for (Seat wanted : {Seat::inside, Seat::absent})
    for (uint64_t g = state().oldest + 1; g < generation && g <= state().last; ++g)
      for (int32_t r = 0; r < ranks_; ++r)
        if (r != rank && seat(g, r) == wanted) return r;
  return rank;
}

bool Order::all_left(uint64_t generation) {
  for (int32_t r = 0; r < ranks_; ++r)
    if (seat(generation, r) != Seat::left) return false;
  return true;
}

bool Order::settled(uint64_t generation) {
  for (int32_t r = 0; r < ranks_; ++r) {
    const Seat s = seat(generation, r);
    if (s == Seat::inside || (s == Seat::absent && !at(generation).abandoned())) return false;
  }
  return true;
}

void Order::forget() {
  State& s = state();
  while (s.oldest < s.last && (all_left(s.oldest + 1) || (s.last - s.oldest > kRemembered && settled(s.oldest + 1))))
    ++s.oldest;
}

bool Order::idle() {
  for (uint64_t g = state().oldest + 1; g <= state().last; ++g)
    if (!settled(g)) return false;
  return true;
}

void Order::bury(int32_t rank, uint64_t abort_word) {
  for (uint64_t g = state().oldest + 1; g <= state().last; ++g) {
    if (seat(g, rank) == Seat::inside) seat(g, rank) = Seat::left;
    if (!at(g).abandoned()) at(g).abort_word = abort_word;
  }
}

}  // namespace mok::cpu
