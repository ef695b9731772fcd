// Tile maths of the CPU backend: f32 accumulation over operands in bf16 or f32, one fixed order over K per element.
//
// Every output element is a chain of fused multiply-adds over K = 0, 1, 2, ... whatever tile it stands in, whatever
// rows share the tile: that is what makes results independent of P, of block sizes and of the other tokens.
#pragma once

#include <cstdint>

namespace mok::cpu {

// A matrix operand by element strides: element (i, j) is at p + i * row + j * col.
struct Operand {
  const void* p;
  int64_t row;
  int64_t col;
};

// The leading dimension and the row count of an f32 scratch tile that can hold m x n.
constexpr int64_t kScratchRowMultiple = 24;
constexpr int64_t kScratchColMultiple = 32;

// One implementation per instruction set and element type; see tile_ops().
struct TileOps {
  const char* isa;

  // c[m, n] (+)= a[m, k] b[k, n]; c is scratch with leading dimension ldc.
  void (*gemm)(int64_t m, int64_t n, int64_t k, Operand a, Operand b, float* c, int64_t ldc, bool accumulate);

  // out = round(c)
  void (*store)(int64_t m, int64_t n, const float* c, int64_t ldc, void* out, int64_t ld);

  // h = round(silu(g) * u); g and u rounded to gate, up as well unless these are null.
  void (*swiglu)(int64_t m, int64_t n, const float* g, const float* u, int64_t ldc, void* h, void* gate, void* up,
                 int64_t ld);

  // From dhu = dY W_d^T and the saved gate, up: d_gate, d_up, hw = round(w * h) in place of the tile, and per row
  // the partial <dhu, h> of this tile. weight = f32 per row, or null for 1.
  void (*swiglu_grad)(int64_t m, int64_t n, const float* dhu, int64_t ldc, const float* weight, const void* gate,
                      const void* up, void* d_gate, void* d_up, void* hw, int64_t ld, float* dot);

  // acc[n] += weight * row[n]
  void (*add_scaled)(int64_t n, float weight, const void* row, float* acc);
};

const TileOps& tile_ops(int32_t elem_bytes);

}  // namespace mok::cpu
