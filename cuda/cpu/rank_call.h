// One rank's part of one call: the protocol around the task stream, and the workers that run the stream.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include "../core/tasks.h"
#include "group.h"
#include "tile.h"

namespace mok::cpu {

constexpr Tiles kTiles = {/*block_m=*/96, /*inter_n=*/128, /*hidden_n=*/256, /*wgrad_m=*/96, /*wgrad_n=*/256,
                          /*combine_m=*/32, /*lag=*/1};

struct Weights {
  const void *gate, *up, *down;
};

struct CallArgs {
  Shape shape;
  int32_t rank;
  double arrival_timeout_s;       // for peers to come to the call
  double timeout_s;               // for everything else
  const void* x;                  // [T, H]
  const int32_t* ids;             // [T, K]
  const float* router_weights;    // [T, K]
  Weights experts, shared;
};

// Runs the call of one rank with `workers` threads and returns how it ended, the same on every rank.
class RankCall {
 public:
  RankCall(Group& group, uint64_t generation, const CallArgs& args);
  virtual ~RankCall() = default;

  Status run(int workers);

 protected:
  virtual void publish() = 0;                     // copies what peers will pull into the arena
  virtual void plan(std::vector<Task>* tasks) = 0;
  virtual void execute(const Task& task) = 0;

  // Waits of tasks. False: the call has failed and the task must stop.
  bool wait_blocks(TaskKind kind, int32_t first_block, int32_t blocks, int32_t tiles);
  bool wait_row_block(int32_t owner, int64_t block);

  // Counts a finished tile of a block; true for the last of `tiles`.
  bool finish_tile(TaskKind kind, int32_t block, int32_t tiles);
  void flag_homes(const Task& task);

  StreamShape stream_shape(bool recompute) const;
  void allocate_counters();

  // Rows of a task's block, as rows of its segment's buffers.
  struct Rows {
    int64_t first;  // row in the routed buffer (or token, for the shared expert)
    int64_t count;
  };
  Rows rows_of(const Task& task) const;
  bool is_shared(const Task& task) const { return task.segment == shape_.local_experts(); }
  int64_t inter_of(const Task& task) const { return segments_[size_t(task.segment)].inter; }

  // Visits the rows of a routed block by source rank.
  template <class Visit>
  void for_each_run(const Task& task, Visit visit) const {
    const int64_t start = routes_.start[first_expert_ + task.segment];
    const Rows rows = rows_of(task);
    const int64_t first = rows.first - start;
    for_each_source(counts_.data(), shape_, int32_t(first_expert_ + task.segment), first, first + rows.count,
                    [&](int32_t src) { return list_start_[size_t(src) * size_t(shape_.local_experts()) + size_t(task.segment)]; },
                    visit);
  }
  // Where the row of one of my own slots is computed. Row -1: no expert.
  struct Place {
    int32_t owner;
    int64_t row;
  };
  Place place_of(int64_t slot) const;

  // A pull of `row_bytes`-sized rows of a per-token array of the sources' arenas into dst (row 0 = routed row 0).
  void pull_rows(const Task& task, int64_t ArenaLayout::*array, uint8_t* dst) const;

  template <class T>
  T* arena(int32_t rank, int64_t offset) const { return reinterpret_cast<T*>(group_.arena(rank) + offset); }

  Group& group_;
  const uint64_t generation_;
  const CallArgs args_;
  const Shape shape_;
  const int32_t rank_;
  const int64_t first_expert_;
  const ArenaLayout layout_;
  const TileOps& ops_;
  const int64_t row_bytes_;  // H elements

  std::vector<int32_t> counts_;       // [P, E]
  Routes routes_{};
  std::vector<Segment> segments_;     // routed, then shared
  int32_t routed_blocks_ = 0;

 private:
  struct Workers;

  template <class Ready>
  bool wait(Wait what, int32_t peer, Ready ready);
  bool peer_aborted();
  double limit_s(Wait what) const { return is_arrival(what) ? args_.arrival_timeout_s : args_.timeout_s; }
  void fail(const Status& status);
  void abort_group(Wait what, int32_t culprit);
  void raise_flag(int32_t kind, uint64_t value);
  bool all_peers(Wait what, int32_t kind, uint64_t value);

  bool begin();
  void sort_and_judge();
  bool exchange();
  void build_tables();
  bool finish();
  void work(Workers& workers);

  std::atomic<bool> failed_{false};
  Status status_;  // written once, before failed_
  std::atomic<int> status_written_{0};
  std::exception_ptr exception_;  // of a task
  std::atomic<bool> exception_written_{false};

  std::vector<int64_t> route_storage_;
  std::vector<int64_t> list_start_;    // [P, local experts]
  std::vector<int32_t> position_;      // [T * K] slot -> position in my sorted list
  std::vector<int32_t> longest_first_;
  std::vector<Task> tasks_;
  std::vector<std::atomic<int32_t>> counters_;  // [task kinds, blocks]
  int32_t blocks_ = 0;
};

}  // namespace mok::cpu
