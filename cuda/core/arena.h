// The symmetric arena: the only memory that peers touch. Same offsets on every rank, one layout for forward and
// backward, so one arena serves every layer of a model.
#pragma once

#include "protocol.h"

namespace mok {

// What a rank says of its own call before anyone reads its rows.
struct Verdict {
  Status status;
  uint64_t shape_digest;
};

struct ArenaLayout {
  int64_t verdict;      // Verdict; first, so that ranks of unlike shapes find it, too
  int64_t tokens_in;    // [T, H] x, as peers pull it
  int64_t grads_in;     // [T, H] dY
  int64_t rows_out;     // [padded_rows, H] y rows (forward) or dX rows (backward)
  int64_t weights;      // [T, K] f32 router weights
  int64_t weight_grads; // [padded_rows] f32 router-weight gradients, one per row
  int64_t slots;        // [T * K] i32 slot numbers sorted by expert
  int64_t counts;       // [E] i32 slots of this rank per expert
  int64_t bytes;
  // Row-block flags, [P, row blocks] u64 generations, written by the owner of the block. A region of their own: only
  // generations are ever stored there, so a flag of another shape's layout is just an old generation.
  int64_t flag_bytes;
};

MOK_HD int64_t max_blocks(const Shape& s, const Tiles& t) { return padded_rows(s, t) / t.block_m; }

MOK_HD ArenaLayout arena_layout(const Shape& s, const Tiles& t) {
  constexpr int64_t kAlign = 256;
  int64_t at = 0;
  ArenaLayout a{};
  const int64_t rows = padded_rows(s, t);
  auto take = [&](int64_t bytes) {
    const int64_t here = at;
    at = align_up(at + bytes, kAlign);
    return here;
  };
  a.verdict = take(sizeof(Verdict));
  a.tokens_in = take(s.tokens * s.hidden * s.elem_bytes);
  a.grads_in = take(s.tokens * s.hidden * s.elem_bytes);
  a.rows_out = take(rows * s.hidden * s.elem_bytes);
  a.weights = take(s.slots() * 4);
  a.weight_grads = take(rows * 4);
  a.slots = take(s.slots() * 4);
  a.counts = take(int64_t{s.experts} * 4);
  a.bytes = at;
  a.flag_bytes = int64_t{s.ranks} * max_blocks(s, t) * 8;
  return a;
}

// Identifies a shape between ranks: FNV-1a over the fields.
MOK_HD uint64_t shape_digest(const Shape& s) {
  const int64_t fields[] = {s.ranks, s.experts, s.top_k, s.elem_bytes, s.tokens, s.hidden, s.inter, s.shared_inter, s.max_rows};
  uint64_t h = 1469598103934665603ull;
  for (int64_t f : fields)
    for (int i = 0; i < 8; ++i) h = (h ^ ((uint64_t(f) >> (8 * i)) & 0xff)) * 1099511628211ull;
  return h;
}

}  // namespace mok
