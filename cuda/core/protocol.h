// The synchronisation protocol between the ranks of an EP group.
//
//   begin(g)    every peer has finished call g-1       -> my arena may be overwritten
//   publish(g)  x (or dy), slot list, counts, verdict  -> peers may read them
//   rows(g, b)  owner's row block b is complete        -> homes with rows in it may read them
//   finish(g)   I read nothing of call g any more      -> leave once every peer has said so
//   abort(g)    I gave up on call g, and why           -> everybody gives up on it
//
// g is the call's generation in its group: 64 bits, it only grows, and no flag is ever reset. Each flag word has
// one writer and lives with its reader, so waiting is local polling. A rank writes nothing else into a peer's arena.
// Because ranks leave a call together, they all succeed or all report an error; no rank runs ahead of a failure.
#pragma once

#include "status.h"

namespace mok {

// Flag words of one rank, indexed by the writing peer. `rows` flags are apart (ArenaLayout::flag_bytes).
struct FlagLayout {
  static constexpr int32_t published = 0;
  static constexpr int32_t finished = 1;
  static constexpr int32_t aborted = 2;
  static constexpr int32_t progress = 3;  // bumped per task by its owner and kept there: tells slow from dead
  static constexpr int32_t kinds = 4;

  MOK_HD static int64_t index(int32_t kind, int32_t peer, int32_t ranks) {
    return int64_t{kind} * ranks + peer;
  }
};

// The abort word: generation, wait and culprit in one store. Generations stay under 2^40; an abort of the last one is
// an abort of all.
constexpr uint64_t kLastGeneration = (uint64_t{1} << 40) - 1;

MOK_HD uint64_t pack_abort(uint64_t generation, Wait wait, int32_t culprit) {
  return (generation << 24) | (uint64_t(wait) << 20) | uint64_t(culprit & 0xfffff);
}
MOK_HD uint64_t abort_generation(uint64_t word) { return word >> 24; }
MOK_HD Status abort_status(uint64_t word) {
  Status s;
  s.rank = int32_t(word & 0xfffff);
  s.value = int64_t((word >> 20) & 0xf);
  switch (Wait(s.value)) {
    case Wait::failure: s.code = Code::peer_failed; break;
    case Wait::death: s.code = Code::peer_died; break;
    case Wait::agreement: s.code = Code::shape_mismatch; break;
    default: s.code = Code::peer_timeout;
  }
  return s;
}

}  // namespace mok
