#include "control.h"

#include <cerrno>
#include <climits>
#include <ctime>
#include <stdexcept>

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../core/types.h"

namespace mok::cpu {
namespace {

constexpr int kLockSeconds = 30;  // the lock is held for microseconds

int64_t align(int64_t at) { return align_up(at, 64); }

}  // namespace

struct Control::Shared {
  uint64_t identity;
  pthread_mutex_t mutex;
  uint32_t rings;
  int32_t processes;
  int32_t lost;  // rank + 1
  Room room;
};

struct Control::Layout {
  int64_t runs, flags, order, run_names, bytes;
  explicit Layout(int32_t ranks) {
    runs = align(sizeof(Shared));
    flags = align(runs + int64_t{ranks} * 4);
    order = align(flags + int64_t{ranks} * FlagLayout::kinds * ranks * 8);
    run_names = align(order + Order::bytes(ranks));
    bytes = align_up(run_names + RunNames::bytes(), 4096);
  }
};

namespace {

void check_file(const SharedFile& file, int64_t bytes) {
  if (file.bytes() != bytes)
    throw std::runtime_error("the memory that EP rank 0 shares is not that of this group; all processes must run the "
                             "same version of jax_mok");
}

}  // namespace

Control::Control(int32_t ranks) : Control(ranks, SharedFile(), 0, true) {}

Control::Control(int32_t ranks, SharedFile file, uint64_t identity, bool found)
    : ranks_(ranks), file_(std::move(file)),
      mapping_([&] {
        if (file_ && found) file_.resize(Layout(ranks).bytes);
        if (file_) check_file(file_, Layout(ranks).bytes);
        return Mapping(file_, Layout(ranks).bytes);
      }()),
      runs_(reinterpret_cast<int32_t*>(mapping_.data() + Layout(ranks).runs)),
      flags_(reinterpret_cast<uint64_t*>(mapping_.data() + Layout(ranks).flags)),
      order_(mapping_.data() + Layout(ranks).order, ranks), run_names_(mapping_.data() + Layout(ranks).run_names) {
  if (found) initialize(identity);
  if (shared().identity != identity)
    throw std::runtime_error("EP rank 0 shares the memory of another group; all processes must run the same program "
                             "with the same version of jax_mok");
  if (file_) hold_lifeline();
}

void Control::initialize(uint64_t identity) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&shared().mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  shared().identity = identity;
}

bool Control::lock() {
  int result = ETIMEDOUT;
  for (int i = 0; i < kLockSeconds && result == ETIMEDOUT; ++i) {  // second by second: the clock may be set meanwhile
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    ++until.tv_sec;
    result = pthread_mutex_timedlock(&shared().mutex, &until);
  }
  // The holder died. What the lock protects is sound after every store, and the holder's end will be noticed.
  if (result == EOWNERDEAD) pthread_mutex_consistent(&shared().mutex);
  return result == 0 || result == EOWNERDEAD;
}

void Control::unlock() { pthread_mutex_unlock(&shared().mutex); }

uint32_t Control::heard() const { return __atomic_load_n(&shared().rings, __ATOMIC_ACQUIRE); }

void Control::ring() {
  __atomic_fetch_add(&shared().rings, 1, __ATOMIC_RELEASE);
  syscall(SYS_futex, &shared().rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Control::wait_for_ring(uint32_t heard) {
  const timespec second{1, 0};
  syscall(SYS_futex, &shared().rings, FUTEX_WAIT, heard, &second, nullptr, 0);
}

// A process is there as long as it holds the lock on the byte of its number: the kernel takes it away at the end of
// the process, however that comes. Unlike a process id it cannot pass to another one.
namespace {

struct flock byte_lock(int32_t process) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = process;
  lock.l_len = 1;
  return lock;
}

}  // namespace

void Control::hold_lifeline() {
  process_ = __atomic_add_fetch(&shared().processes, 1, __ATOMIC_ACQ_REL);
  struct flock lock = byte_lock(process_);
  if (fcntl(file_.descriptor(), F_SETLK, &lock) != 0) throw std::runtime_error("cannot lock shared memory (fcntl)");
}

bool Control::claim(int32_t rank) {
  int32_t nobody = 0;
  return __atomic_compare_exchange_n(&runs_[rank], &nobody, process_, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ||
         nobody == process_;
}

bool Control::has_died(int32_t rank) const {
  const int32_t process = __atomic_load_n(&runs_[rank], __ATOMIC_ACQUIRE);
  if (process == 0 || process == process_) return false;
  struct flock lock = byte_lock(process);
  return fcntl(file_.descriptor(), F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

int32_t Control::lost_rank() const { return __atomic_load_n(&shared().lost, __ATOMIC_ACQUIRE) - 1; }
void Control::set_lost_rank(int32_t rank) { __atomic_store_n(&shared().lost, rank + 1, __ATOMIC_RELEASE); }

Control::Room& Control::room() const { return shared().room; }

}  // namespace mok::cpu
