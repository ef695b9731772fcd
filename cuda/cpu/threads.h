// Threads that the CPU backend runs its calls on. A pool that grows whenever nobody is idle: a call may block on a
// peer for long, and what runs after it (XLA's continuation) may block too, so a fixed pool could starve.
#pragma once

#include <functional>

namespace mok::cpu {

// False if there is no thread to be had; the job is then not run.
bool run_on_thread(std::function<void()> job);

// Cores this process may use.
int core_count();

}  // namespace mok::cpu
