// Waits and failure inside a kernel: every wait has a deadline, and a call that fails in one place ends everywhere.
#pragma once

#include "params.h"
#include "ptx/sync.h"

namespace mok {

__device__ inline uint64_t* flag_of(const CallState& c, int32_t reader, int32_t kind, int32_t writer) {
  return reinterpret_cast<uint64_t*>(c.seat_memory[reader] + SeatMemory::flags + SeatFlag::offset(kind, writer));
}
__device__ inline uint64_t heard(const CallState& c, int32_t kind, int32_t writer) {
  return ptx::load_acquire_sys(flag_of(c, c.seat, kind, writer));
}
// One word of this seat's on every seat, by a thread or by a warp: a release waits for the one before, so many take long.
__device__ inline void tell_all(const CallState& c, int32_t kind, uint64_t word, int lane = 0, int lanes = 1) {
  for (int32_t s = lane; s < c.seats; s += lanes) ptx::store_release_sys(flag_of(c, s, kind, c.seat), word);
}

__device__ inline bool has_failed(const CallState& c) { return ptx::load_acquire_gpu(c.failed) != 0; }

// Is a rank still in this call? Until I tell `finished` it can have left only by failing.
__device__ inline uint64_t place_in(const CallState& c, int32_t rank) {
  return pack_place(c.generation, int64_t{c.coords[1]} * c.ranks + rank);
}
__device__ inline bool still_here(const CallState& c, int32_t rank, int32_t seat) {
  return heard(c, SeatFlag::arrived, seat) == place_in(c, rank);
}

__device__ inline uint64_t* last_failed(const CallState& c) {
  return reinterpret_cast<uint64_t*>(c.seat_memory[c.seat] + SeatMemory::last_failed);
}

// The first failure of a call on this seat is the one that the host hears of, unless it has not heard of the last yet.
__device__ __noinline__ bool fail(const CallState& c, const Status& why) {
  if (atomicExch(c.failed, 1u) != 0) return false;
  *c.status = int32_t(why.code);
  if (c.ranks > 1) *last_failed(c) = c.generation;
  if (ptx::load_acquire_sys(&c.host_status->code) != 0 && c.host_status->generation > c.acknowledged) return true;
  ptx::store_system(reinterpret_cast<int64_t*>(&c.host_status->generation), int64_t(c.generation));
  ptx::store_system(&c.host_status->rank, why.rank);
  ptx::store_system(&c.host_status->value, why.value);
  ptx::store_system(&c.host_status->extra, why.code == Code::peer_timeout ? int64_t(c.deadline_ns) : why.extra);
  ptx::store_release_sys(&c.host_status->code, uint64_t(why.code));
  return true;
}
__device__ inline void give_up(const CallState& c, Wait what, int32_t culprit) {
  const uint64_t word = pack_group_abort(c.generation, what, culprit, c.coords[1]);
  if (fail(c, group_abort_status(word))) tell_all(c, SeatFlag::aborted, word);
}
// A call that was launched behind one that failed: it fails at once, on all ranks, and the host need not hear of it. It
// has a word of its own, for a peer may not have heard yet of the failure itself.
__device__ inline void skip_behind_failure(const CallState& c) {
  if (*last_failed(c) <= c.acknowledged) return;
  atomicExch(c.failed, 1u);
  *c.status = int32_t(Code::peer_failed);
  tell_all(c, SeatFlag::skipped, pack_group_abort(c.generation, Wait::failure, c.coords[0], c.coords[1]));
}

// Has a rank of this group given up on this call?
__device__ inline bool hear_abort(const CallState& c) {
  for (int32_t i = 0; i < 2 * c.seats; ++i) {
    const uint64_t word = heard(c, i & 1 ? SeatFlag::skipped : SeatFlag::aborted, i / 2);
    if (abort_generation(word) != c.generation || abort_group(word) != (c.coords[1] & 1023)) continue;
    fail(c, group_abort_status(word));
    return true;
  }
  return false;
}

// Between polls of a wait that takes long: has the call failed meanwhile, or waited too long? Not inlined: the waits are
// many, and this is off every fast path.
__device__ __noinline__ bool must_stop(const CallState& c, uint64_t since, int patience, Wait what, int32_t peer) {
  if (has_failed(c) || hear_abort(c)) return true;
  if (ptx::nanoseconds() - since <= patience * c.deadline_ns) return false;
  give_up(c, what, peer);
  return true;
}

// Polls until ready(). False: the call has failed, stop. `what` and `peer` say what is missing, should it never come.
template <class Ready>
__device__ inline bool wait_until(const CallState& c, Wait what, int32_t peer, Ready ready, int patience = 1) {
  const uint64_t start = ptx::nanoseconds();
  for (int polls = 0; !ready(); ++polls) {
    if (polls == 0) continue;
    __nanosleep(20);
    if (polls % 256 == 0 && must_stop(c, start, patience, what, peer)) return false;
  }
  return true;
}

// A counter of this rank's own work. In the end that is waiting for a peer, too: whoever waits for the peer itself knows
// its name and has the first word.
__device__ inline bool wait_counter(const CallState& c, const uint32_t* word, uint32_t target) {
  return wait_until(c, Wait::rows, c.coords[0], [&] { return ptx::load_acquire_gpu(word) >= target; }, 2);
}

}  // namespace mok
