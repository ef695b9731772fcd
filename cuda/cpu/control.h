// What the ranks of a group share besides their rows: a lock that outlives its holder, a bell, flags, the order of
// calls, and who is still there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "../core/protocol.h"
#include "memory.h"
#include "order.h"

namespace mok::cpu {

// Flag words are plain memory, as on a GPU; these are the only ways to touch them.
inline uint64_t load_acquire(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

class Control {
 public:
  explicit Control(int32_t ranks);  // within this process
  // In a file: made by the group's founder, joined by the others. Throws if it is not the control of this group.
  Control(int32_t ranks, SharedFile file, uint64_t identity, bool found);

  bool lock();  // false: a process that is stopped, but not dead, has held the lock for long
  void unlock();
  void ring();  // whoever waits shall look again
  void wait_for_ring(uint32_t heard);  // for more rings than were heard, or a second
  uint32_t heard() const;

  // Says that this process runs the rank. False: another one has said so.
  bool claim(int32_t rank);
  bool spans_processes() const { return bool(file_); }
  bool has_died(int32_t rank) const;  // the process that runs the rank has ended, or left the group

  int32_t lost_rank() const;  // the first rank whose end was noticed, or -1
  void set_lost_rank(int32_t rank);

  uint64_t* flag(int32_t rank, int32_t kind, int32_t peer) const {
    return flags_ + int64_t{rank} * FlagLayout::kinds * ranks_ + FlagLayout::index(kind, peer, ranks_);
  }
  Order& order() { return order_; }
  RunNames& run_names() { return run_names_; }
  const SharedFile& file() const { return file_; }

  // Under the lock: what every rank's arena and row flags take.
  struct Room { int64_t arena = 0, flags = 0; };
  Room& room() const;

 private:
  struct Shared;
  struct Layout;

  Shared& shared() const { return *reinterpret_cast<Shared*>(mapping_.data()); }
  void initialize(uint64_t identity);
  void hold_lifeline();

  const int32_t ranks_;
  const SharedFile file_;
  const Mapping mapping_;
  int32_t* const runs_;     // [ranks] number of the process that runs it, from 1; 0: nobody has said so
  uint64_t* const flags_;   // [ranks, kinds, ranks]
  Order order_;
  RunNames run_names_;
  int32_t process_ = 1;     // this one's number
};

// Holds the lock, if it could be had.
class Locked {
 public:
  explicit Locked(Control& control) : control_(control), held_(control.lock()) {}
  ~Locked() { if (held_) control_.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  explicit operator bool() const { return held_; }
  void pause(uint32_t heard) {  // gives the lock away for a while
    control_.unlock();
    held_ = false;
    control_.wait_for_ring(heard);
  }
  bool resume() { return held_ = control_.lock(); }

 private:
  Control& control_;
  bool held_;
};

}  // namespace mok::cpu
