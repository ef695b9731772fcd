// Kernel parameters, filled in by the host and passed by value. Plain data, the same for host and device.
#pragma once

#include "../core/arena.h"
#include "tensor_map.h"

namespace mok {

// A seat is a GPU of the job; its arena is mapped at a fixed place into every other seat's address space. Which seat
// plays which EP rank is found out on the device, call by call: the rank is an operand.
constexpr int32_t kMaxSeats = 128;

// Offsets in a seat's address range. Flag words are indexed by the seat that writes them and live with the seat that
// reads them; rows follow ArenaLayout.
struct SeatMemory {
  static constexpr int64_t flags = 0;
  static constexpr int64_t copy_words = 32 << 10;       // tickets taken, pieces done of the copy of x; zero between calls
  static constexpr int64_t last_failed = copy_words + 64;  // generation of this seat's last call that failed
  static constexpr int64_t row_flags = 64 << 10;        // [seats, row blocks] generations
  static constexpr int64_t rows = int64_t{4} << 30;
  static constexpr int64_t address_range = int64_t{1} << 39;
};
struct SeatFlag {
  // arrived: generation and place in the group, see pack_place; no place any more once a failed call is left.
  // aborted, skipped: see pack_group_abort. The others are generations.
  static constexpr int32_t arrived = 0, published = 1, finished = 2, aborted = 3, skipped = 4, kinds = 5;
  MOK_HD static int64_t offset(int32_t kind, int32_t writer) { return (int64_t{kind} * kMaxSeats + writer) * 8; }
};
static_assert(SeatFlag::kinds * kMaxSeats * 8 <= SeatMemory::copy_words, "flag words fit in front");

// Who makes the call: group number * ranks + rank, the same numbering on every seat.
MOK_HD uint64_t pack_place(uint64_t generation, int64_t place) { return (generation << 24) | uint64_t(place & 0xffffff); }
MOK_HD uint64_t place_generation(uint64_t word) { return word >> 24; }
MOK_HD int64_t place_of(uint64_t word) { return int64_t(word & 0xffffff); }
constexpr int64_t kNoPlace = 0xffffff;

// The protocol's abort word with the group in it, modulo 1024: seats hear of all groups.
MOK_HD uint64_t pack_group_abort(uint64_t generation, Wait wait, int32_t culprit, int32_t group) {
  return pack_abort(generation, wait, culprit | (group & 1023) << 10);
}
MOK_HD int32_t abort_group(uint64_t word) { return int32_t(word >> 10) & 1023; }
MOK_HD Status group_abort_status(uint64_t word) {
  Status s = abort_status(word);
  s.rank &= 1023;
  return s;
}
static_assert(kMaxSeats <= 1024, "ranks fit beside the group");

// Why a call failed, in host memory that the device writes: the code last.
struct HostStatus {
  uint64_t code;
  int64_t rank;
  int64_t value;
  int64_t extra;
  uint64_t generation;
};

// What every part of a call knows of it. Seats are absent for a group of one.
struct CallState {
  uint64_t generation;
  uint64_t acknowledged;     // failures up to this generation have been raised
  uint64_t deadline_ns;      // a wait longer than this fails the call
  uint32_t* failed;          // 1 = the call has failed
  int32_t* status;           // the call's result: how it ended
  HostStatus* host_status;
  const int32_t* coords;     // [2] rank, group
  int32_t ranks;
  int32_t seat;              // of this GPU
  int32_t seats;
  uint8_t* seat_memory[kMaxSeats];
};

// One task of the forward stream: a 128-row x (128 gate + 128 up | 256 down) column tile for each CTA of a cluster.
struct PairTask {
  int32_t kind;    // bit 0: 0 = gate_up, 1 = down; bit 1: of the shared expert
  int32_t expert;  // local
  int32_t pair;    // number of the row-block pair; those of the shared expert follow the routed ones
  int32_t tile;    // column tile; in a split pair, tile 2 * tile + CTA
};

// Rows of one expert that come from one rank: which, and where they stand in that rank's sorted slot list.
struct Source {
  int32_t end;    // one past the last, in the expert's segment
  int32_t shift;  // row in the segment + shift = place in the list
};

// Tables that the routing kernel writes and the main kernel reads; all in this rank's device memory. Rows are those of
// this rank's routed buffer, E = experts of the group, L = local ones, P = ranks.
struct RouteTables {
  uint64_t* peers;        // [P] arena of each rank
  int32_t* peer_seats;    // [P]
  int32_t* sorted;        // [T * K] own slots by expert; in the arena, if there is one
  int32_t* slot_place;    // [T * K] place of each slot in `sorted`, -1 = no expert
  uint64_t* slot_result;  // [T * K] address of the slot's result, once it is there; 0 = no expert
  int32_t* token_order;   // [T] tokens as their results will be complete, about
  int32_t* list_start;    // [E + 1] where each expert starts in `sorted`
  int32_t* counts;        // [P, E] slots of each rank; only with peers
  int32_t* row_shift;     // [E] place in `sorted` + shift = row at the owner
  int32_t* segment_start; // [E] first row of the expert at its owner
  int32_t* back_chunk;    // [E + 1] first chunk of results to fetch; expert order of back_expert()
  Source* sources;        // [L, P]
  int32_t* block_pair;    // [row blocks]
  int32_t* pair_expert;   // [pairs] in the order of the stream
  int32_t* pair_row;      // [pairs] first row
  int32_t* pair_split;    // [pairs] 1 = one row block, both CTAs work on it
  int32_t* by_length;     // [L] experts, those with most rows first
  PairTask* tasks;        // of the forward pass; null = not wanted
  int32_t* totals;        // see Total
  uint32_t* counters;     // see Counter

  // Rows of ranks in front of `rank`, in the segment of a local expert.
  MOK_HD int32_t rows_before(int32_t expert, int32_t rank, int32_t ranks) const {
    return rank == 0 ? 0 : sources[int64_t{expert} * ranks + rank - 1].end;
  }
};
struct Total {
  static constexpr int32_t tasks = 0, rows = 1, back_chunks = 2, pairs = 3, judged = 4, count = 5;  // judged: all ranks fail alike
};

constexpr int32_t kPairRows = 256;  // of a pair of row blocks, on which a cluster works
constexpr int32_t kChunkRows = 8;   // that a mover warp takes at a time

// Results are fetched in the order in which owners finish them: by number of the expert at its owner, own rank first
// (whose rows need no fetching), then the ranks before it around, see place_of_pair().
MOK_HD int32_t back_expert(int32_t i, int32_t rank, int32_t ranks, int32_t local_experts) {
  const int32_t owner = rank - i % ranks;
  return (owner < 0 ? owner + ranks : owner) * local_experts + i / ranks;
}
MOK_HD int32_t back_index(int32_t expert, int32_t rank, int32_t ranks, int32_t local_experts) {
  const int32_t behind = rank - expert / local_experts;
  return expert % local_experts * ranks + (behind < 0 ? behind + ranks : behind);
}

// Words of RouteTables::counters. Zeroed by the routing kernel.
struct Counter {
  static constexpr int32_t failed = 0, ticket = 1, pull_ticket = 2, back_ticket = 3, combine_ticket = 4, read = 5,
                           combined = 6, poison_ticket = 7, arrays = 8;
  int64_t pairs, local_experts;
  // [pairs] rows pulled; warps done with a tile of gate_up, of hidden_grad, of down or input_grad
  MOK_HD int64_t pulled(int64_t pair) const { return arrays + pair; }
  MOK_HD int64_t hidden(int64_t pair) const { return arrays + pairs + pair; }
  MOK_HD int64_t hidden_grad(int64_t pair) const { return arrays + 2 * pairs + pair; }
  MOK_HD int64_t out(int64_t pair) const { return arrays + 3 * pairs + pair; }
  // [local experts + 1] warps done with a hidden_grad tile, over the pairs of the expert; the shared expert last
  MOK_HD int64_t expert(int64_t e) const { return arrays + 4 * pairs + e; }
  // [chunks] results fetched
  MOK_HD int64_t back(int64_t chunk) const { return expert(local_experts + 1) + chunk; }
  MOK_HD static int64_t words(int64_t pairs, const Shape& s) {
    const int64_t chunks = s.ranks > 1 ? ceil_div(s.slots(), kChunkRows) + s.experts : 0;
    return Counter{pairs, s.local_experts()}.back(chunks);
  }
};

// An array [T, H] that peers pull rows of, and where it stands in the arena. Null = not there.
struct Published {
  const uint16_t* tokens;
  int64_t offset;
};

struct RouteParams {
  CallState call;
  RouteTables routes;
  Shape shape;
  ArenaLayout layout;
  const int32_t* ids;            // [T, K]
  Published published[2];
  const float* router_weights;   // [T, K], if peers want them
  int32_t* tokens_per_expert;    // [E]
  int32_t* rows_per_rank;        // [P]
  int64_t max_pairs;
  uint64_t digest;               // of the call: must be the same on all ranks
};

// What moves rows in, and results out, in either pass.
struct MoverParams {
  CallState call;
  RouteTables routes;
  ArenaLayout layout;
  const int32_t* ids;            // [T, K]
  const float* router_weights;   // [T, K]
  Published published[2];
  uint16_t* rows_in[2];          // [rows, H] routed rows of each
  const uint16_t* rows_out;      // [rows, H] results per row; in the arena, if there is one
  uint16_t* rows_back;           // [T * K, H] own results from other ranks, by place in `sorted`
  const uint16_t* shared_out;    // [T, H]
  uint16_t* sum;                 // [T, H] y or dx
  int64_t tokens;
  int32_t local_experts;
  int64_t max_rows;              // of the routed arrays
  int64_t max_pairs;             // the shared expert's counted
  int64_t max_blocks;            // row flags of a seat
};

struct ForwardParams : MoverParams {
  TensorMap rows, gate, up, hidden, hidden_out, down, y_out;
  TensorMap shared_rows, shared_gate, shared_up, shared_hidden, shared_hidden_out, shared_down, shared_y_out;
  TensorMap save_gate, save_up, save_shared_gate, save_shared_up;  // g and u for the backward pass, if it wants them
};

}  // namespace mok
