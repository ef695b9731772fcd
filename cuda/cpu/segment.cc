#include "segment.h"

#include <utility>

namespace mok::cpu {

void LayerCall::gate_up_tile(const Task& t, const Matrix& x, const Matrix& hidden, const Matrix& gate,
                             const Matrix& up) {
  const Rows rows = rows_of(t);
  const int64_t inter = inter_of(t);
  const Columns n = column_tile(t.tile, kTiles.inter_n, inter);
  float *g = scratch_tile(0), *u = scratch_tile(1);
  for (auto [which, c] : {std::pair{&Weights::gate, g}, std::pair{&Weights::up, u}})
    ops_.gemm(rows.count, n.count, shape_.hidden, x.rows_from(rows.first),
              weight(t, which, shape_.hidden, inter).rows_from(0, n.first), c, kScratchCols, false);
  auto tile_of = [&](const Matrix& m) { return m.p == nullptr ? nullptr : m.at(rows.first, n.first); };
  ops_.swiglu(rows.count, n.count, g, u, kScratchCols, tile_of(hidden), tile_of(gate), tile_of(up), inter);
}

bool LayerCall::wait_shared_tokens(TaskKind kind, int64_t first, int64_t last) {
  const int64_t block = first / kTiles.block_m, end = (last - 1) / kTiles.block_m + 1;
  return wait_blocks(kind, segments_.back().first_block + int32_t(block), int32_t(end - block), hidden_tiles());
}

}  // namespace mok::cpu
