#include "threads.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace mok::cpu {
namespace {

class ElasticPool {
 public:
  bool run(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    if (idle_ >= int(jobs_.size())) {
      wake_.notify_one();
      return true;
    }
    try {
      std::thread([this] { work(); }).detach();
      return true;
    } catch (const std::system_error&) {
      jobs_.pop_back();
      return false;
    }
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (jobs_.empty()) {
        ++idle_;
        wake_.wait(lock);
        --idle_;
      }
      std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  int idle_ = 0;
};

}  // namespace

bool run_on_thread(std::function<void()> job) {
  static ElasticPool* const pool = new ElasticPool;  // never destroyed: its threads outlive main
  return pool->run(std::move(job));
}

int core_count() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const int n = int(std::thread::hardware_concurrency());
  return n > 0 ? n : 1;
}

}  // namespace mok::cpu
