// What the launches of both passes share: work space, tensor maps, the state of a call.
#pragma once

#include "cuda_driver.h"
#include "cuda_seats.h"

namespace mok::ffi {

constexpr Tiles kCudaTiles = {/*block_m=*/128, /*inter_n=*/128, /*hidden_n=*/256, 0, 0, 0, /*lag=*/0};
constexpr unsigned kMainThreads = 384;
constexpr unsigned kMainShared = 229376 + 256;  // stages, store buffers, barriers: as in device/sm90/pipeline.h

// Kernels of one pass and shape, loaded on every device of the process.
struct CudaKernels {
  void* route;
  void* main;  // of the forward pass or of the backward pass
};

// What both passes take: device addresses, shapes as in MoE calls (core/types.h).
struct CudaInputs {
  Shape shape;
  double timeout_s;
  const int32_t* coords;         // [2] rank, group
  const void* x;
  const int32_t* ids;
  const float* router_weights;
  const void *gate, *up, *down, *shared_gate, *shared_up, *shared_down;
};

// Hands out 256-byte-aligned pieces; without a base it only adds up.
class Pieces {
 public:
  explicit Pieces(uint8_t* base) : base_(base) {}
  template <class T>
  void take(T** piece, int64_t n) {
    *piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at_);
    at_ += align_up(n * int64_t{sizeof(T)}, 256);
  }
  int64_t bytes() const { return at_; }

 private:
  uint8_t* base_;
  int64_t at_ = 0;
};

// Sizes of a rank's routed buffers.
struct Extent {
  int64_t rows, blocks, pairs;  // pairs of the shared expert counted
};
Extent extent_of(const Shape& shape);

// `tasks`: column tiles of a pair's tasks in the table, 0 = no table.
void take_routes(Pieces& pieces, const Shape& shape, int64_t tasks, RouteTables* routes);

// Boxes of 128 bytes a row: 64 columns of bf16, 32 of f32.
struct Encoder {
  const CudaDriver& driver;
  int failed = 0;

  void rows(TensorMap* map, const void* base, int64_t rows, int64_t columns, uint32_t box_rows);  // 2D
  void weights(TensorMap* map, const void* base, int64_t experts, int64_t rows, int64_t columns, uint32_t box_rows = 64,
               int32_t elem_bytes = 2);
};

CallState call_state(const CudaSeats& seats, int32_t seat, const CallOrder::Place& place, const Shape& shape,
                     double timeout_s, const int32_t* coords, uint32_t* failed, int32_t* status);

// What the movers of both passes take from the call's inputs and from its routing.
void fill_movers(const CudaInputs& call, const RouteParams& route, MoverParams* movers);

// The two launches of a call. Return 0 or the driver's error code.
int launch_both(const CudaDriver& driver, const CudaKernels& kernels, const RouteParams& route, MoverParams* main,
                void* stream, int multiprocessors);

}  // namespace mok::ffi
