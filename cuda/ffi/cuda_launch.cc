#include "cuda_launch.h"

namespace mok::ffi {
namespace {

constexpr unsigned kForwardThreads = 384, kRouteThreads = 1024, kRouteCtas = 8, kCopyClusters = 15;
constexpr unsigned kForwardShared = 229376 + 256;  // stages, store buffers, barriers: as in device/sm90/pipeline.h

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

struct Workspace {
  uint16_t *rows_in, *hidden, *rows_y, *rows_back, *shared_hidden, *shared_y;
  RouteTables routes;
  int64_t rows, blocks, pairs, bytes;
};

Workspace lay_out(const Shape& s, uint8_t* base) {
  Pieces p(base);
  Workspace w{};
  const bool exchange = s.ranks > 1;
  const int64_t shared_tokens = s.shared_inter > 0 ? s.tokens : 0;
  w.rows = padded_rows(s, kCudaTiles);
  w.blocks = w.rows / kCudaTiles.block_m;
  w.pairs = w.blocks + ceil_div(shared_tokens, 2 * kCudaTiles.block_m);
  const int64_t wider = s.inter > s.shared_inter ? s.inter : s.shared_inter;
  const int64_t tiles = ceil_div(wider, kCudaTiles.inter_n) + ceil_div(s.hidden, kCudaTiles.hidden_n);
  p.take(&w.rows_in, w.rows * s.hidden);
  p.take(&w.hidden, w.rows * s.inter);
  p.take(&w.rows_y, exchange ? 0 : w.rows * s.hidden);
  p.take(&w.rows_back, exchange ? s.slots() * s.hidden : 0);
  p.take(&w.shared_hidden, shared_tokens * s.shared_inter);
  p.take(&w.shared_y, shared_tokens * s.hidden);
  p.take(&w.routes.peers, s.ranks);
  p.take(&w.routes.peer_seats, s.ranks);
  p.take(&w.routes.sorted, exchange ? 0 : s.slots());
  p.take(&w.routes.slot_place, s.slots());
  p.take(&w.routes.slot_result, s.slots());
  p.take(&w.routes.token_order, s.tokens);
  p.take(&w.routes.list_start, s.experts + 1);
  p.take(&w.routes.row_shift, s.experts);
  p.take(&w.routes.segment_start, s.experts);
  p.take(&w.routes.back_chunk, s.experts + 1);
  p.take(&w.routes.sources, s.experts);  // local experts x ranks
  p.take(&w.routes.block_pair, w.blocks);
  p.take(&w.routes.pair_expert, w.pairs);
  p.take(&w.routes.pair_row, w.pairs);
  p.take(&w.routes.pair_split, w.pairs);
  p.take(&w.routes.tasks, w.pairs * tiles);
  p.take(&w.routes.totals, Total::count);
  p.take(&w.routes.counters, Counter::words(w.pairs, s));
  w.bytes = p.bytes();
  return w;
}

// Boxes of 64 columns: [rows, columns] arrays by rows, [experts, rows, columns] weights by 64 rows.
struct Encoder {
  const CudaDriver& driver;
  int failed = 0;

  void rows(TensorMap* map, const void* base, int64_t rows, int64_t columns, uint32_t box_rows) {
    const uint64_t dims[] = {uint64_t(columns), uint64_t(rows)}, strides[] = {uint64_t(columns) * 2};
    const uint32_t box[] = {64, box_rows};
    failed |= driver.encode(map, base, 2, dims, strides, box);
  }
  void weights(TensorMap* map, const void* base, int64_t experts, int64_t rows, int64_t columns) {
    const uint64_t dims[] = {uint64_t(columns), uint64_t(rows), uint64_t(experts)};
    const uint64_t strides[] = {uint64_t(columns) * 2, uint64_t(rows) * uint64_t(columns) * 2};
    const uint32_t box[] = {64, 64, 1};
    failed |= driver.encode(map, base, 3, dims, strides, box);
  }
};

int encode_maps(const CudaDriver& driver, const CudaForward& c, const Workspace& w, const void* rows_y, ForwardParams* p) {
  const Shape& s = c.shape;
  const int64_t local = s.local_experts();
  Encoder e{driver};
  e.rows(&p->rows, w.rows_in, w.rows, s.hidden, 128);
  e.rows(&p->hidden, w.hidden, w.rows, s.inter, 128);
  e.rows(&p->hidden_out, w.hidden, w.rows, s.inter, 16);
  e.rows(&p->y_out, rows_y, w.rows, s.hidden, 16);
  e.weights(&p->gate, c.gate, local, s.hidden, s.inter);
  e.weights(&p->up, c.up, local, s.hidden, s.inter);
  e.weights(&p->down, c.down, local, s.inter, s.hidden);
  if (s.shared_inter == 0) return e.failed;
  e.rows(&p->shared_rows, c.x, s.tokens, s.hidden, 128);
  e.rows(&p->shared_hidden, w.shared_hidden, s.tokens, s.shared_inter, 128);
  e.rows(&p->shared_hidden_out, w.shared_hidden, s.tokens, s.shared_inter, 16);
  e.rows(&p->shared_y_out, w.shared_y, s.tokens, s.hidden, 16);
  e.weights(&p->shared_gate, c.shared_gate, 1, s.hidden, s.shared_inter);
  e.weights(&p->shared_up, c.shared_up, 1, s.hidden, s.shared_inter);
  e.weights(&p->shared_down, c.shared_down, 1, s.shared_inter, s.hidden);
  return e.failed;
}

CallState call_state(const CudaSeats& seats, int32_t seat, uint64_t generation, const CudaForward& c, uint32_t* failed) {
  CallState state{};
  state.generation = generation;
  state.deadline_ns = uint64_t(c.timeout_s * 1e9);
  state.failed = failed;
  state.host_status = seats.host_status(seat);
  state.coords = c.coords;
  state.ranks = c.shape.ranks;
  if (c.shape.ranks == 1) return state;
  state.seat = seat;
  state.seats = seats.count();
  for (int32_t i = 0; i < seats.count(); ++i) state.seat_memory[i] = seats.memory(i);
  return state;
}

}  // namespace

int64_t cuda_workspace_bytes(const Shape& shape) { return lay_out(shape, nullptr).bytes; }

ArenaLayout cuda_arena_layout(const Shape& shape) { return arena_layout(shape, kCudaTiles); }

int launch_forward(const CudaDriver& driver, const CudaKernels& kernels, const CudaSeats& seats, int32_t seat,
                   uint64_t generation, const CudaForward& c, void* stream, int multiprocessors) {
  const Shape& s = c.shape;
  Workspace w = lay_out(s, static_cast<uint8_t*>(c.workspace));
  const ArenaLayout layout = cuda_arena_layout(s);
  if (s.ranks > 1) {
    uint8_t* const rows = seats.memory(seat) + SeatMemory::rows;
    w.rows_y = reinterpret_cast<uint16_t*>(rows + layout.rows_out);
    w.routes.sorted = reinterpret_cast<int32_t*>(rows + layout.slots);
  }
  const CallState state = call_state(seats, seat, generation, c, w.routes.counters + Counter::failed);
  RouteParams route{state, w.routes, s, layout, c.ids, static_cast<const uint16_t*>(c.x), c.tokens_per_expert,
                    c.rows_per_rank, c.status, w.pairs};
  ForwardParams p{};
  if (const int failed = encode_maps(driver, c, w, w.rows_y, &p); failed != 0) return failed;
  p.call = state;
  p.routes = w.routes;
  p.layout = layout;
  p.ids = c.ids;
  p.x = static_cast<const uint16_t*>(c.x);
  p.router_weights = c.router_weights;
  p.rows_in = w.rows_in;
  p.rows_y = w.rows_y;
  p.rows_back = w.rows_back;
  p.shared_y = w.shared_y;
  p.y = static_cast<uint16_t*>(c.y);
  p.tokens = s.tokens;
  p.local_experts = s.local_experts();
  p.max_pairs = w.pairs;
  p.max_blocks = w.blocks;
  const unsigned ctas = kRouteCtas * (s.ranks > 1 ? 1 + kCopyClusters : 1);
  const unsigned shared_bytes = unsigned(34 * s.experts + 64) * 4;  // as RouteShared in device/route.cu
  if (const int failed = driver.launch(kernels.route, ctas, kRouteThreads, shared_bytes, stream, &route); failed != 0)
    return failed;
  return driver.launch(kernels.forward, unsigned(multiprocessors) / 2 * 2, kForwardThreads, kForwardShared, stream, &p);
}

}  // namespace mok::ffi
