// The order of a group's calls: which calls there are, who is in them and whose turn it is. Plain memory of one size,
// which processes can share. Whoever holds the group's lock may use it; every change is complete with its last store,
// so a process that dies in the middle of one leaves nothing that others could trip over.
#pragma once

#include <cstdint>
#include <map>

namespace mok::cpu {

// What makes two ranks' calls the same call: the XLA run and the call site in the program. Both are the same numbers
// in every process that runs the same program.
struct CallKey {
  int64_t run = 0;
  uint64_t site = 0;
  bool operator==(const CallKey& o) const { return run == o.run && site == o.site; }
};

// XLA counts the runs of an executable from a number that is the same in every process, unless one of them has the
// executable from a compilation cache. So the first process to come to a call site writes down what its run is called,
// and the others translate theirs, if it is called otherwise.
class RunNames {
 public:
  static int64_t bytes();
  explicit RunNames(uint8_t* memory) : memory_(memory) {}  // zeroed memory is an empty table

  // Puts the group's name of the run in place of this process's. False: a run was taken for the first one that was not,
  // because it overtook it, and nothing can be told any more.
  bool translate(CallKey* key);

 private:
  struct State { uint64_t added; };
  struct Site { uint64_t site; int64_t first; uint64_t translated; };
  struct Own { int64_t first, offset; uint64_t index; };

  State& state() { return *reinterpret_cast<State*>(memory_); }
  Site& at(uint64_t index);
  uint64_t find_or_add(const CallKey& key);

  uint8_t* const memory_;
  std::map<uint64_t, Own> own_;  // of this process, by site
};

class Order {
 public:
  enum class Seat : uint8_t { absent, inside, left };

  struct Call {
    uint64_t generation;  // its place in the order, from 1
    CallKey key;
    uint64_t need;        // digest of the memory that it needs
    uint64_t abort_word;  // 0: go on
    bool abandoned() const { return abort_word != 0; }
  };

  static int64_t bytes(int32_t ranks);
  Order(uint8_t* memory, int32_t ranks) : memory_(memory), ranks_(ranks) {}  // zeroed memory is an order without calls

  // Seats the rank in the oldest call with this key that it has not been in, or in a new one. Null if there is no room.
  Call* take_seat(int32_t rank, CallKey key, uint64_t need);
  Call* find(uint64_t generation);
  void leave(int32_t rank, uint64_t generation);

  // Whether the rank has no earlier call to go through first; `alone`: and nobody at all is in an earlier one.
  bool is_turn(int32_t rank, uint64_t generation, bool alone);
  // The rank that keeps this one from its turn.
  int32_t blocker(int32_t rank, uint64_t generation);
  bool idle();  // nobody is in a call or expected in one

  // This rank is gone for good.
  void bury(int32_t rank, uint64_t abort_word);

 private:
  struct State { uint64_t oldest, last; };  // generations less one that are remembered: oldest < g <= last

  State& state() { return *reinterpret_cast<State*>(memory_); }
  Call& at(uint64_t generation);
  Seat& seat(uint64_t generation, int32_t rank);
  bool all_left(uint64_t generation);
  bool settled(uint64_t generation);  // nobody is inside, and nobody is expected
  void forget();

  uint8_t* const memory_;
  const int32_t ranks_;
};

}  // namespace mok::cpu
