// An EP group: the ranks' arenas and flags, and the order of their calls. The ranks are threads of one process, or of
// several processes of a host that share the memory; the code is the same.
//
// On a GPU the stream gives every rank the same order of calls. XLA's CPU runtime gives none: independent calls may
// reach the ranks in different orders. So the first rank to arrive with a call fixes its place in the group's order,
// and every rank takes its calls in that order. The place is the call's generation.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "control.h"
#include "memory.h"

namespace mok::cpu {

class Group {
 public:
  explicit Group(int32_t ranks);  // within this process

  // Across processes: one founds the group of this name, the others join it by its handle. Both throw if they cannot;
  // null if the founder is gone.
  static std::shared_ptr<Group> found(int32_t ranks, const std::string& name);
  static std::shared_ptr<Group> join(int32_t ranks, const std::string& name, const std::string& handle);
  std::string handle() const;
  static bool is_own(const std::string& handle);  // a group of this process

  // Takes the rank's place in the next call with this key and waits for its turn, as long as anything moves in the
  // group or `patience_s`. Arenas then have room for `need`, unless the call was abandoned meanwhile: then there is
  // nothing left to do in it but to report why.
  struct Place {
    uint64_t generation;  // 0: there is no place to be had
    uint64_t abort_word;  // 0: go on
  };
  Place enter(int32_t rank, CallKey key, const ArenaLayout& need, double patience_s);
  void leave(int32_t rank, uint64_t generation);
  // The call failed: tells all ranks inside, and ranks that never came are not waited for.
  void abandon(int32_t rank, uint64_t generation, uint64_t abort_word);
  // If the process of a rank has ended, every call of the group is abandoned, this one and all to come.
  void look_for_lost();

  int32_t ranks() const { return ranks_; }
  uint8_t* arena(int32_t rank) const { return arenas_.of(rank); }
  uint64_t* row_flags(int32_t rank) const { return reinterpret_cast<uint64_t*>(row_flags_.of(rank)); }
  uint64_t* flag(int32_t rank, int32_t kind, int32_t peer) const { return control_.flag(rank, kind, peer); }
  Buffer& scratch(int32_t rank) { return scratch_[size_t(rank)]; }
  uint64_t progress() const;  // grows with every task that any rank finishes

  int64_t held_bytes();  // arenas, row flags and scratch of all ranks
  void release();        // gives the memory back, unless a call is in flight
  void poison();         // tests: fills arenas and scratch with NaN

 private:
  Group(int32_t ranks, SharedFile control, SharedFile arenas, SharedFile row_flags, uint64_t identity, bool found);

  template <class Ready>
  bool await(Locked& locked, double patience_s, Ready ready);
  bool lacks_room(const ArenaLayout& need) const;
  void make_room(const ArenaLayout& need);
  void give_up(int32_t rank, uint64_t generation, uint64_t abort_word);
  uint64_t lost_word() const;  // the abort word of a group that lost a rank, or 0

  const int32_t ranks_;
  Control control_;
  Pieces arenas_, row_flags_;
  std::vector<Buffer> scratch_;
};

// A rank's stay in a call: enters on construction, leaves on destruction. A stay that ends by an exception abandons
// the call, and its peers give up on it at once.
class Entrance {
 public:
  Entrance(Group& group, int32_t rank, CallKey key, const ArenaLayout& need, double patience_s)
      : group_(group), rank_(rank), place_(group.enter(rank, key, need, patience_s)),
        exceptions_(std::uncaught_exceptions()) {}
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

}  // namespace mok::cpu
