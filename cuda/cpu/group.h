// An EP group inside one process: the ranks' arenas and flags, and the order of their calls.
//
// On a GPU the stream gives every rank the same order of calls. XLA's CPU runtime gives none: independent calls may
// reach the ranks in different orders. So the first rank to arrive with a call fixes its place in the group's order,
// and every rank takes its calls in that order. The place is the call's generation.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/arena.h"

namespace mok::cpu {

// Flag words are plain memory in arenas, as on a GPU; these are the only ways to touch them.
inline uint64_t load_acquire(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

// What makes two ranks' calls the same call: the XLA run and the call site in the program.
struct CallKey {
  int64_t run = 0;
  const void* site = nullptr;
  bool operator==(const CallKey& o) const { return run == o.run && site == o.site; }
};

// Grow-only aligned memory, zeroed when it grows.
class Buffer {
 public:
  uint8_t* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  void reserve(int64_t bytes);
  void release() { data_.reset(); bytes_ = 0; }

 private:
  struct Free { void operator()(uint8_t* p) const { std::free(p); } };
  std::unique_ptr<uint8_t, Free> data_;
  int64_t bytes_ = 0;
};

class Group {
 public:
  explicit Group(int32_t ranks);

  // The group with this number among the groups of a mesh axis. `mesh` tells apart groups with other members: each
  // keeps an order of its own. A group of one needs no peers to agree with it, so any idle one serves; it goes back
  // when the pointer dies.
  static std::shared_ptr<Group> get(int32_t ranks, const std::string& mesh, int32_t number);

  // Takes the rank's place in the next call with this key and waits for its turn. Arenas then have room for `need`,
  // unless the call was abandoned meanwhile: then there is nothing left to do in it but to report why.
  struct Place {
    uint64_t generation;
    uint64_t abort_word;  // 0: go on
  };
  Place enter(int32_t rank, CallKey key, const ArenaLayout& need);
  void leave(int32_t rank, uint64_t generation);
  // The call failed: tells all ranks inside, and ranks that never came are not waited for.
  void abandon(int32_t rank, uint64_t generation, uint64_t abort_word);

  int32_t ranks() const { return ranks_; }
  uint8_t* arena(int32_t rank) const { return members_[rank]->arena.data(); }
  uint64_t* row_flags(int32_t rank) const { return reinterpret_cast<uint64_t*>(members_[rank]->row_flags.data()); }
  uint64_t* flag(int32_t rank, int32_t kind, int32_t peer) const {
    return &members_[rank]->flags[FlagLayout::index(kind, peer, ranks_)];
  }
  Buffer& scratch(int32_t rank) const { return members_[rank]->scratch; }
  int64_t held_bytes();  // arenas, flags and scratch of all ranks
  void release();        // gives the memory back, unless a call is in flight
  void poison();         // tests: fills arenas and scratch with NaN

 private:
  struct Member {
    Buffer arena, row_flags, scratch;
    std::vector<uint64_t> flags;
  };
  enum class Seat : uint8_t { absent, inside, left };
  struct Entry {
    uint64_t generation;
    CallKey key;
    std::vector<Seat> seats;
    uint64_t abort_word = 0;
    bool abandoned() const { return abort_word != 0; }
    bool settled() const;  // nobody is inside, and nobody is expected
    bool complete() const;
  };

  uint64_t find_or_append(int32_t rank, CallKey key, Seat seat);  // returns the generation
  Entry* find(uint64_t generation);
  bool my_turn(int32_t rank, uint64_t generation, bool must_grow) const;
  void grow(const ArenaLayout& need);
  void give_up(int32_t rank, uint64_t generation, uint64_t abort_word);
  void forget_finished();
  bool idle() const;

  const int32_t ranks_;
  std::vector<std::unique_ptr<Member>> members_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> order_;
  uint64_t last_generation_ = 0;
  int64_t arena_bytes_ = 0, flag_bytes_ = 0;
};

// A rank's stay in a call: enters on construction, leaves on destruction. A stay that ends by an exception abandons
// the call, and its peers give up on it at once.
class Entrance {
 public:
  Entrance(Group& group, int32_t rank, CallKey key, const ArenaLayout& need)
      : group_(group), rank_(rank), place_(group.enter(rank, key, need)), exceptions_(std::uncaught_exceptions()) {}
  ~Entrance() {
    if (std::uncaught_exceptions() > exceptions_)
      group_.abandon(rank_, generation(), pack_abort(generation(), Wait::failure, rank_));
    group_.leave(rank_, generation());
  }
  Entrance(const Entrance&) = delete;
  Entrance& operator=(const Entrance&) = delete;
  uint64_t generation() const { return place_.generation; }
  bool abandoned() const { return place_.abort_word != 0; }
  Status why() const { return abort_status(place_.abort_word); }

 private:
  Group& group_;
  const int32_t rank_;
  const Group::Place place_;
  const int exceptions_;
};

// Over all groups of the process, for tests and diagnostics.
int64_t held_bytes();
void release_all();
void poison_all();

}  // namespace mok::cpu
