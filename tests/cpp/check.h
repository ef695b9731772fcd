// What a failed check does, random numbers and threads for ranks. Part of cpu_test.cc.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../../cuda/cpu/layer.h"
#include "../../cuda/cpu/registry.h"

namespace mok::cpu {
namespace {

// ---- checking ----

[[noreturn]] void fail(int line, const char* condition, const std::string& where) {
  std::fprintf(stderr, "cpu_test.cc:%d: %s does not hold: %s\n", line, condition, where.c_str());
  std::fflush(stderr);
  std::_Exit(1);  // other ranks' threads may be waiting for this one: an orderly exit could hang
}
#define CHECK(condition, where) \
  do { if (!(condition)) fail(__LINE__, #condition, where); } while (0)

std::string num(int64_t v) { return std::to_string(v); }

std::string text(const Status& s) {
  return "Status{" + num(int64_t(s.code)) + ", rank " + num(s.rank) + ", " + num(s.value) + ", " + num(s.extra) + "}";
}

bool operator==(const Status& a, const Status& b) {
  return a.code == b.code && a.rank == b.rank && a.value == b.value && a.extra == b.extra;
}

// splitmix64: the same numbers with every compiler and library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t in(int64_t lo, int64_t hi) { return lo + int64_t(bits() % uint64_t(hi - lo + 1)); }
  double unit() { return double(bits() >> 11) * 0x1p-53; }
  double normal() { return (unit() + unit() + unit() + unit() - 2.0) * 1.7320508; }

 private:
  uint64_t state_;
};

template <class Body>
void on_ranks(int32_t ranks, Body body) {
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r) threads.emplace_back([&body, r] { body(r); });
  for (auto& t : threads) t.join();
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace
}  // namespace mok::cpu
