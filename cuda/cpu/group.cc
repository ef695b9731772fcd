#include "group.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>
#include <stdexcept>

#include <unistd.h>

#include "patience.h"

namespace mok::cpu {
namespace {

constexpr int64_t kPage = 4096;

const char* const kStopped = "a process of the EP group is stopped in the middle of entering or leaving a call";

uint64_t digest(const std::string& text, uint64_t h = 1469598103934665603ull) {
  for (unsigned char c : text) h = (h ^ c) * 1099511628211ull;
  return h;
}

uint64_t identity(int32_t ranks, const std::string& name) { return digest(name, digest("1/" + std::to_string(ranks))); }

uint64_t digest(const ArenaLayout& need) {
  return digest(std::to_string(need.bytes) + "/" + std::to_string(need.flag_bytes));
}

// Where process ids mean the same: a host, and a namespace on it.
std::string host() {
  std::string boot = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = {};
  const ssize_t n = readlink("/proc/self/ns/pid", space, sizeof space - 1);
  return boot + (n > 0 ? "/" + std::string(space, size_t(n)) : "");
}

struct Handle {
  std::string host;
  int64_t pid = 0;
  int control = -1, arenas = -1, row_flags = -1;
};

Handle parse(const std::string& text) {
  Handle h;
  if (!(std::istringstream(text) >> h.host >> h.pid >> h.control >> h.arenas >> h.row_flags))
    throw std::runtime_error("'" + text + "' is not the handle of an EP group; all processes must run the same version "
                             "of jax_mok");
  return h;
}

}  // namespace

Group::Group(int32_t ranks) : Group(ranks, SharedFile(), SharedFile(), SharedFile(), 0, true) {}

Group::Group(int32_t ranks, SharedFile control, SharedFile arenas, SharedFile row_flags, uint64_t identity, bool found)
    : ranks_(ranks),
      control_(control ? Control(ranks, std::move(control), identity, found) : Control(ranks)),
      arenas_(ranks, std::move(arenas)), row_flags_(ranks, std::move(row_flags)), scratch_(size_t(ranks)) {}

std::shared_ptr<Group> Group::found(int32_t ranks, const std::string& name) {
  auto file = [](const char* label) { return SharedFile::create(std::string("jax_mok ") + label); };
  return std::shared_ptr<Group>(
      new Group(ranks, file("control"), file("arenas"), file("row flags"), identity(ranks, name), true));
}

std::shared_ptr<Group> Group::join(int32_t ranks, const std::string& name, const std::string& handle) {
  const Handle h = parse(handle);
  if (h.host != host())
    throw std::runtime_error("EP rank 0 runs on another host (or in another PID namespace) than this process; on CPUs "
                             "an EP group spans processes of one host only");
  SharedFile control = SharedFile::of_process(h.pid, h.control), arenas = SharedFile::of_process(h.pid, h.arenas);
  SharedFile row_flags = SharedFile::of_process(h.pid, h.row_flags);
  if (!control || !arenas || !row_flags) return nullptr;
  return std::shared_ptr<Group>(new Group(ranks, std::move(control), std::move(arenas), std::move(row_flags),
                                          identity(ranks, name), false));
}

std::string Group::handle() const {
  std::ostringstream text;
  text << host() << ' ' << getpid() << ' ' << control_.file().descriptor() << ' ' << arenas_.file().descriptor() << ' '
       << row_flags_.file().descriptor();
  return text.str();
}

bool Group::is_own(const std::string& handle) {
  const Handle h = parse(handle);
  return h.pid == getpid() && h.host == host();
}

// ---- the order of calls ----

// Until ready() or, with nothing moving, for `patience_s`. The lock is held before and after, and given away between.
template <class Ready>
bool Group::await(Locked& locked, double patience_s, Ready ready) {
  Patience patience(patience_s);
  while (!ready()) {
    const uint32_t heard = control_.heard();
    locked.pause(heard);
    look_for_lost();
    if (!locked.resume()) throw std::runtime_error(kStopped);
    if (patience.is_out(progress() + heard)) return false;
  }
  return true;
}

Group::Place Group::enter(int32_t rank, CallKey key, const ArenaLayout& need, double patience_s) {
  Locked locked(control_);
  if (!locked) throw std::runtime_error(kStopped);
  if (!control_.claim(rank)) return {0, pack_abort(kLastGeneration, Wait::agreement, rank)};
  if (control_.spans_processes() && !control_.run_names().translate(&key))
    return {0, pack_abort(kLastGeneration, Wait::agreement, rank)};
  Order& order = control_.order();
  Order::Call* call = nullptr;
  auto seated = [&] { return lost_word() != 0 || (call = order.take_seat(rank, key, digest(need))) != nullptr; };
  if (!await(locked, patience_s, seated))
    return {0, pack_abort(kLastGeneration, Wait::previous_call, order.blocker(rank, kLastGeneration))};
  if (lost_word() != 0) return {0, lost_word()};

  const uint64_t generation = call->generation;
  if (call->need != digest(need)) give_up(rank, generation, pack_abort(generation, Wait::agreement, rank));
  auto turn = [&] { return call->abandoned() || order.is_turn(rank, generation, lacks_room(need)); };
  if (!await(locked, patience_s, turn))
    give_up(rank, generation, pack_abort(generation, Wait::previous_call, order.blocker(rank, generation)));
  if (call->abandoned()) return {generation, call->abort_word};
  try {
    make_room(need);
  } catch (...) {  // no memory: the call is over for everybody
    give_up(rank, generation, pack_abort(generation, Wait::failure, rank));
    order.leave(rank, generation);
    throw;
  }
  return {generation, 0};
}

bool Group::lacks_room(const ArenaLayout& need) const {
  const Control::Room& room = control_.room();
  return need.bytes > room.arena || need.flag_bytes > room.flags || arenas_.bytes() != room.arena ||
         row_flags_.bytes() != room.flags;
}

// Makes room for everybody, or maps what another process made room for. Nobody is in an earlier call then, and nobody
// of this process in a later one: it would have come through this one first.
void Group::make_room(const ArenaLayout& need) {
  if (!lacks_room(need)) return;
  Control::Room& room = control_.room();
  const Control::Room wanted{align_up(std::max(room.arena, need.bytes), kPage),
                             align_up(std::max(room.flags, need.flag_bytes), kPage)};
  arenas_.resize(wanted.arena);
  row_flags_.resize(wanted.flags);
  room = wanted;
  control_.ring();
}

void Group::leave(int32_t rank, uint64_t generation) {
  Locked locked(control_);
  if (!locked) return;
  control_.order().leave(rank, generation);
  control_.ring();
}

void Group::abandon(int32_t rank, uint64_t generation, uint64_t abort_word) {
  Locked locked(control_);
  if (locked) give_up(rank, generation, abort_word);
}

void Group::give_up(int32_t rank, uint64_t generation, uint64_t abort_word) {
  for (int32_t peer = 0; peer < ranks_; ++peer) {
    uint64_t* const word = flag(peer, FlagLayout::aborted, rank);
    store_release(word, std::max(*word, abort_word));
  }
  if (Order::Call* call = control_.order().find(generation); call != nullptr && !call->abandoned())
    call->abort_word = abort_word;
  control_.ring();
}

uint64_t Group::progress() const {
  uint64_t all = 0;
  for (int32_t r = 0; r < ranks_; ++r) all += __atomic_load_n(flag(r, FlagLayout::progress, r), __ATOMIC_RELAXED);
  return all;
}

// ---- ranks whose process ended ----

uint64_t Group::lost_word() const {
  const int32_t rank = control_.lost_rank();
  return rank < 0 ? 0 : pack_abort(kLastGeneration, Wait::death, rank);
}

void Group::look_for_lost() {
  if (!control_.spans_processes() || control_.lost_rank() >= 0) return;
  int32_t rank = 0;
  while (rank < ranks_ && !control_.has_died(rank)) ++rank;
  if (rank == ranks_) return;
  Locked locked(control_);
  if (!locked || control_.lost_rank() >= 0) return;
  control_.set_lost_rank(rank);
  // The column of its own aborts has no other writer any more.
  for (int32_t peer = 0; peer < ranks_; ++peer) store_release(flag(peer, FlagLayout::aborted, rank), lost_word());
  for (int32_t r = 0; r < ranks_; ++r)
    if (control_.has_died(r)) control_.order().bury(r, lost_word());
  control_.ring();
}

// ---- memory ----

int64_t Group::held_bytes() {
  Locked locked(control_);
  int64_t bytes = ranks_ * (arenas_.bytes() + row_flags_.bytes());
  for (const Buffer& b : scratch_) bytes += b.bytes();
  return bytes;
}

void Group::release() {
  Locked locked(control_);
  if (!locked || !control_.order().idle()) return;
  control_.room() = {};
  arenas_.release();
  row_flags_.release();
  for (Buffer& b : scratch_) b.release();
}

void Group::poison() {
  Locked locked(control_);
  if (!locked || !control_.order().idle()) return;
  const bool there = arenas_.bytes() > 0 && arenas_.bytes() == control_.room().arena;
  for (int32_t r = 0; there && r < ranks_; ++r) std::memset(arenas_.of(r), 0xff, size_t(arenas_.bytes()));
  for (const Buffer& b : scratch_)
    if (b.bytes() > 0) std::memset(b.data(), 0xff, size_t(b.bytes()));
}

}  // namespace mok::cpu
