#include "group.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <new>
#include <tuple>

namespace mok::cpu {
namespace {

constexpr size_t kTombstones = 64;  // abandoned calls remembered for ranks that come very late

struct Registry {
  std::mutex mutex;
  std::map<std::tuple<int32_t, std::string, int32_t>, std::shared_ptr<Group>> groups;
  std::vector<std::shared_ptr<Group>> singles;
};

Registry& registry() {
  static Registry* const r = new Registry;  // never destroyed: calls may still run at exit
  return *r;
}

std::shared_ptr<Group> idle_single() {
  Registry& r = registry();
  for (auto& g : r.singles)
    if (g.use_count() == 1) return g;
  r.singles.push_back(std::make_shared<Group>(1));
  return r.singles.back();
}

template <class Visit>
void for_each_group(Visit visit) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  for (auto& item : r.groups) visit(*item.second);
  for (auto& g : r.singles) visit(*g);
}

}  // namespace

void Buffer::reserve(int64_t bytes) {
  if (bytes <= bytes_) return;
  const size_t size = size_t(align_up(bytes, 4096));
  data_.reset();
  // calloc of a large size is lazily zeroed memory: the room for the worst case costs nothing until it is used
  void* p = std::calloc(size, 1);
  if (p == nullptr) { bytes_ = 0; throw std::bad_alloc(); }
  data_.reset(static_cast<uint8_t*>(p));
  bytes_ = int64_t(size);
}

Group::Group(int32_t ranks) : ranks_(ranks) {
  for (int32_t r = 0; r < ranks; ++r) {
    members_.push_back(std::make_unique<Member>());
    members_.back()->flags.resize(size_t(FlagLayout::kinds) * size_t(ranks));
  }
}

std::shared_ptr<Group> Group::get(int32_t ranks, const std::string& mesh, int32_t number) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  if (ranks == 1) return idle_single();
  auto& g = r.groups[{ranks, mesh, number}];
  if (g == nullptr) g = std::make_shared<Group>(ranks);
  return g;
}

bool Group::Entry::complete() const {
  return std::all_of(seats.begin(), seats.end(), [](Seat s) { return s == Seat::left; });
}

bool Group::Entry::settled() const {
  return std::all_of(seats.begin(), seats.end(),
                     [this](Seat s) { return s == Seat::left || (abandoned() && s == Seat::absent); });
}

uint64_t Group::find_or_append(int32_t rank, CallKey key, Seat seat) {
  auto it = std::find_if(order_.begin(), order_.end(), [&](const Entry& e) {
    return e.key == key && e.seats[size_t(rank)] == Seat::absent;
  });
  if (it == order_.end()) {
    order_.push_back(Entry{++last_generation_, key, std::vector<Seat>(size_t(ranks_), Seat::absent)});
    it = std::prev(order_.end());
  }
  it->seats[size_t(rank)] = seat;
  return it->generation;
}

Group::Entry* Group::find(uint64_t generation) {
  for (Entry& e : order_)
    if (e.generation == generation) return &e;
  return nullptr;
}

bool Group::my_turn(int32_t rank, uint64_t generation, bool must_grow) const {
  for (const Entry& e : order_) {
    if (e.generation >= generation) return true;
    const Seat seat = e.seats[size_t(rank)];
    if (seat == Seat::inside || (seat == Seat::absent && !e.abandoned())) return false;
    if (must_grow && !e.settled()) return false;  // a peer may still read the old arenas
  }
  return true;
}

Group::Place Group::enter(int32_t rank, CallKey key, const ArenaLayout& need) {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t generation = find_or_append(rank, key, Seat::inside);
  auto must_grow = [&] { return need.bytes > arena_bytes_ || need.flag_bytes > flag_bytes_; };
  changed_.wait(lock, [&] { return find(generation)->abandoned() || my_turn(rank, generation, must_grow()); });
  if (const uint64_t word = find(generation)->abort_word; word != 0) return {generation, word};
  if (must_grow()) {
    try {
      grow(need);
    } catch (...) {  // no memory: the call is over for everybody
      give_up(rank, generation, pack_abort(generation, Wait::failure, rank));
      find(generation)->seats[size_t(rank)] = Seat::left;
      throw;
    }
    changed_.notify_all();
  }
  return {generation, 0};
}

void Group::grow(const ArenaLayout& need) {
  const int64_t arena = std::max(arena_bytes_, need.bytes), flags = std::max(flag_bytes_, need.flag_bytes);
  arena_bytes_ = flag_bytes_ = 0;  // until every rank has them
  for (auto& m : members_) {
    m->arena.reserve(arena);
    m->row_flags.reserve(flags);
  }
  arena_bytes_ = arena;
  flag_bytes_ = flags;
}

void Group::leave(int32_t rank, uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Entry* e = find(generation)) e->seats[size_t(rank)] = Seat::left;
  forget_finished();
  changed_.notify_all();
}

void Group::abandon(int32_t rank, uint64_t generation, uint64_t abort_word) {
  std::lock_guard<std::mutex> lock(mutex_);
  give_up(rank, generation, abort_word);
}

void Group::give_up(int32_t rank, uint64_t generation, uint64_t abort_word) {
  for (int32_t peer = 0; peer < ranks_; ++peer) store_release(flag(peer, FlagLayout::aborted, rank), abort_word);
  if (Entry* e = find(generation); e != nullptr && !e->abandoned()) e->abort_word = abort_word;
  changed_.notify_all();
}

void Group::forget_finished() {
  order_.erase(std::remove_if(order_.begin(), order_.end(), [](const Entry& e) { return e.complete(); }), order_.end());
  size_t stones = size_t(std::count_if(order_.begin(), order_.end(), [](const Entry& e) { return e.settled(); }));
  for (auto it = order_.begin(); stones > kTombstones && it != order_.end();) {
    if (it->settled()) { it = order_.erase(it); --stones; } else { ++it; }
  }
}

bool Group::idle() const {
  return std::all_of(order_.begin(), order_.end(), [](const Entry& e) { return e.settled(); });
}

int64_t Group::held_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (auto& m : members_) bytes += m->arena.bytes() + m->row_flags.bytes() + m->scratch.bytes();
  return bytes;
}

void Group::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!idle()) return;
  arena_bytes_ = flag_bytes_ = 0;
  for (auto& m : members_)
    for (Buffer* b : {&m->arena, &m->row_flags, &m->scratch}) b->release();
}

void Group::poison() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!idle()) return;
  for (auto& m : members_)
    for (Buffer* b : {&m->arena, &m->scratch})
      if (b->bytes() > 0) std::memset(b->data(), 0xff, size_t(b->bytes()));
}

int64_t held_bytes() {
  int64_t bytes = 0;
  for_each_group([&](Group& g) { bytes += g.held_bytes(); });
  return bytes;
}

void release_all() {
  for_each_group([](Group& g) { g.release(); });
}

void poison_all() {
  for_each_group([](Group& g) { g.poison(); });
}

}  // namespace mok::cpu
