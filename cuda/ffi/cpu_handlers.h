// What the Python module registers with XLA.
#pragma once

#include <vector>

namespace mok::ffi {

struct Handler {
  const char* name;
  void* instantiate;
  void* execute;
};
std::vector<Handler> cpu_handlers();

}  // namespace mok::ffi
