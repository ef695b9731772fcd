// Types every layer shares. Plain C++17: g++ compiles this into the CPU backend, NVRTC into the kernels.
#pragma once

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstddef>
#include <cstdint>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MOK_HD __host__ __device__ inline
#else
#define MOK_HD inline
#endif

namespace mok {

MOK_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MOK_HD constexpr int64_t align_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
MOK_HD constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// The static shape of one call: everything that XLA knows at compile time. Counts are per rank unless said.
struct Shape {
  int32_t ranks;          // P, size of the expert-parallel group
  int32_t experts;        // E, over the whole group; a multiple of ranks
  int32_t top_k;          // K, slots per token
  int32_t elem_bytes;     // 2 = bfloat16, 4 = float32
  int64_t tokens;         // T
  int64_t hidden;         // H
  int64_t inter;          // I
  int64_t shared_inter;   // I_s, width of the shared expert; 0 = none
  int64_t max_rows;       // routed rows that a rank may receive, padding not counted

  MOK_HD int32_t local_experts() const { return experts / ranks; }
  MOK_HD int64_t slots() const { return tokens * top_k; }
};

// Tile sizes. They set the padding of segments and the task stream, never a bit of any result.
struct Tiles {
  int32_t block_m;    // rows of a row block; expert segments start on a multiple of it
  int32_t inter_n;    // columns of I in one gate/up (or hidden-gradient) tile
  int32_t hidden_n;   // columns of H in one down (or input-gradient) tile
  int32_t wgrad_m;    // weight-gradient tile
  int32_t wgrad_n;
  int32_t combine_m;  // tokens in one combine task
  int32_t lag;        // row blocks by which the second GEMM trails the first
};

// Rows of the routed buffer of one rank, padding counted: every non-empty segment may waste block_m - 1 rows.
MOK_HD int64_t padded_rows(const Shape& s, const Tiles& t) {
  return align_up(s.max_rows + min_of(s.local_experts(), s.max_rows) * (t.block_m - 1), t.block_m);
}

}  // namespace mok
