// Kernel parameters, filled in by the host and passed by value. Plain data, the same for host and device.
#pragma once

#include "../core/arena.h"
#include "tensor_map.h"

namespace mok {

// One task of the forward stream on a pair of row blocks: a 256 x 128 tile of h or a 256 x 256 tile of y.
struct PairTask {
  int32_t kind;    // 0 = gate_up, 1 = down
  int32_t expert;  // local
  int32_t pair;    // number of the row-block pair
  int32_t tile;    // column tile
};

// Tables that the routing kernel writes and the main kernel reads; all in this rank's device memory.
struct RouteTables {
  int32_t* row_source;   // [rows] token at its home (in .x) of each routed row, -1 = padding
  int32_t* row_pair;     // [rows] pair of row blocks that the row stands in
  int32_t* slot_row;     // [T * K] routed row of each slot at its owner, -1 = no expert
  int32_t* pair_expert;  // [pairs]
  int32_t* pair_row;     // [pairs] first row
  int32_t* pair_rows;    // [pairs] rows, padding to 128 counted: 128 or 256
  PairTask* tasks;
  int32_t* totals;       // [0] tasks, [1] rows, padding counted
  uint32_t* counters;    // see Counter
};

// Words of RouteTables::counters. Zeroed by the routing kernel.
struct Counter {
  static constexpr int32_t ticket = 0, pull_ticket = 1, combine_ticket = 2, failed = 3, arrays = 4;
  // then [pairs] rows pulled, [pairs] warps done with a gate_up tile, [pairs] warps done with a down tile
  MOK_HD static int64_t pulled(int64_t pair) { return arrays + pair; }
  MOK_HD static int64_t hidden(int64_t pair, int64_t max_pairs) { return arrays + max_pairs + pair; }
  MOK_HD static int64_t out(int64_t pair, int64_t max_pairs) { return arrays + 2 * max_pairs + pair; }
};

// Why a call failed, in host memory that the device writes: the code last.
struct HostStatus {
  uint64_t code;
  int64_t value;
  int64_t extra;
};

struct ForwardParams {
  TensorMap rows, gate, up, hidden, down, hidden_out, y_out;
  RouteTables routes;
  const uint16_t* x;             // [T, H] bf16
  const float* router_weights;   // [T, K]
  uint16_t* rows_in;             // [rows, H] routed rows of x
  const uint16_t* rows_y;        // [rows, H] results per row
  uint16_t* y;                   // [T, H]
  int64_t tokens;
  int64_t max_pairs;
  uint64_t deadline_ns;          // a wait longer than this fails the call
  HostStatus* host_status;
};

struct RouteParams {
  RouteTables routes;
  const int32_t* ids;            // [T, K]
  int32_t* tokens_per_expert;    // [E]
  int32_t* rows_per_rank;        // [P]
  int32_t* status;
  int64_t tokens;
  int64_t max_rows;              // padding not counted
  int64_t max_pairs;
  HostStatus* host_status;
};

}  // namespace mok
