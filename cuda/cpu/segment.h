// Where the data of a segment's rows lives while a call runs, and scratch memory to put it.
#pragma once

#include <cstring>

#include "rank_call.h"

namespace mok::cpu {

constexpr int64_t kScratchRows = 120;
constexpr int64_t kScratchCols = 256 + kScratchColMultiple;
static_assert(kTiles.block_m <= kScratchRows - kScratchRowMultiple + 1 && kTiles.wgrad_m <= 96);
static_assert(kTiles.inter_n <= 256 && kTiles.hidden_n <= 256 && kTiles.wgrad_n <= 256);

// memcpy that takes the null pointers that an empty array may have.
inline void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, size_t(bytes));
}

// An f32 tile of this thread. `which`: tiles that are alive together.
inline float* scratch_tile(int which) {
  alignas(64) static thread_local float tiles[2][kScratchRows * kScratchCols];
  return tiles[which];
}

// Hands out pieces of one rank's grow-only scratch memory; ask for all sizes first, then for the pointers.
class ScratchPlan {
 public:
  int64_t add(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += align_up(bytes, 256);
    return at;
  }
  uint8_t* reserve(Buffer& buffer) const {
    buffer.reserve(bytes_);
    return buffer.data();
  }

 private:
  int64_t bytes_ = 0;
};

// A [rows, columns] array of elements.
struct Matrix {
  uint8_t* p = nullptr;
  int64_t columns = 0;
  int32_t elem_bytes = 0;

  uint8_t* at(int64_t row, int64_t column = 0) const { return p + (row * columns + column) * elem_bytes; }
  // Operands of a product: rows as they are, or with the contraction over rows (transposed).
  Operand rows_from(int64_t row, int64_t column = 0) const { return {at(row, column), columns, 1}; }
  Operand transposed(int64_t row, int64_t column = 0) const { return {at(row, column), 1, columns}; }
};

inline Matrix matrix(const void* p, int64_t columns, int32_t elem_bytes) {
  return {static_cast<uint8_t*>(const_cast<void*>(p)), columns, elem_bytes};
}

// A column tile: first column and width.
struct Columns {
  int64_t first;
  int64_t count;
};
inline Columns column_tile(int32_t tile, int64_t width, int64_t total) {
  const int64_t first = tile * width;
  return {first, min_of(width, total - first)};
}

// What forward and backward share of the tile work: weights by segment, and the first GEMM.
class LayerCall : public RankCall {
 protected:
  using RankCall::RankCall;

  Matrix matrix_of(const void* p, int64_t columns) const { return matrix(p, columns, shape_.elem_bytes); }

  // The [rows, columns] weight of the task's expert.
  Matrix weight(const Task& t, const void* Weights::*which, int64_t rows, int64_t columns) const {
    const Matrix all = matrix_of((is_shared(t) ? args_.shared : args_.experts).*which, columns);
    return matrix_of(all.at(is_shared(t) ? 0 : t.segment * rows), columns);
  }

  int32_t inter_tiles(const Task& t) const { return int32_t(ceil_div(inter_of(t), kTiles.inter_n)); }
  int32_t hidden_tiles() const { return int32_t(ceil_div(shape_.hidden, kTiles.hidden_n)); }

  // g, u = x W_g, x W_u for one tile; h = silu(g) * u into `hidden`, g and u into `gate` and `up`, each if it is there.
  void gate_up_tile(const Task& t, const Matrix& x, const Matrix& hidden, const Matrix& gate, const Matrix& up);

  // Waits until all row blocks of the tokens [first, last) of the shared expert have finished `kind`.
  bool wait_shared_tokens(TaskKind kind, int64_t first, int64_t last);
};

}  // namespace mok::cpu
