#include "cuda_launch.h"

namespace mok::ffi {
namespace {

struct Workspace {
  uint16_t *rows_in, *hidden, *rows_y, *rows_back, *shared_hidden, *shared_y;
  RouteTables routes;
  int64_t bytes;
};

Workspace lay_out(const Shape& s, bool save, uint8_t* base) {
  Pieces p(base);
  Workspace w{};
  const bool exchange = s.ranks > 1;
  const int64_t rows = extent_of(s).rows, shared_tokens = s.shared_inter > 0 ? s.tokens : 0;
  const int64_t wider = s.inter > s.shared_inter ? s.inter : s.shared_inter;
  p.take(&w.rows_in, save ? 0 : rows * s.hidden);
  p.take(&w.hidden, rows * s.inter);
  p.take(&w.rows_y, exchange ? 0 : rows * s.hidden);
  p.take(&w.rows_back, exchange ? s.slots() * s.hidden : 0);
  p.take(&w.shared_hidden, shared_tokens * s.shared_inter);
  p.take(&w.shared_y, shared_tokens * s.hidden);
  take_routes(p, s, ceil_div(wider, kCudaTiles.inter_n) + ceil_div(s.hidden, kCudaTiles.hidden_n), &w.routes);
  w.bytes = p.bytes();
  return w;
}

int encode_maps(const CudaDriver& driver, const CudaForward& c, const Workspace& w, const void* rows_y, ForwardParams* p) {
  const Shape& s = c.shape;
  const int64_t local = s.local_experts(), rows = extent_of(s).rows;
  Encoder e{driver};
  e.rows(&p->rows, w.rows_in, rows, s.hidden, 128);
  e.rows(&p->hidden, w.hidden, rows, s.inter, 128);
  e.rows(&p->hidden_out, w.hidden, rows, s.inter, 16);
  e.rows(&p->y_out, rows_y, rows, s.hidden, 16);
  e.weights(&p->gate, c.gate, local, s.hidden, s.inter);
  e.weights(&p->up, c.up, local, s.hidden, s.inter);
  e.weights(&p->down, c.down, local, s.inter, s.hidden);
  if (c.saved[0] != nullptr) {
    e.rows(&p->save_gate, c.saved[1], rows, s.inter, 16);
    e.rows(&p->save_up, c.saved[2], rows, s.inter, 16);
  }
  if (s.shared_inter == 0) return e.failed;
  if (c.saved[0] != nullptr) {
    e.rows(&p->save_shared_gate, c.saved[3], s.tokens, s.shared_inter, 16);
    e.rows(&p->save_shared_up, c.saved[4], s.tokens, s.shared_inter, 16);
  }
  e.rows(&p->shared_rows, c.x, s.tokens, s.hidden, 128);
  e.rows(&p->shared_hidden, w.shared_hidden, s.tokens, s.shared_inter, 128);
  e.rows(&p->shared_hidden_out, w.shared_hidden, s.tokens, s.shared_inter, 16);
  e.rows(&p->shared_y_out, w.shared_y, s.tokens, s.hidden, 16);
  e.weights(&p->shared_gate, c.shared_gate, 1, s.hidden, s.shared_inter);
  e.weights(&p->shared_up, c.shared_up, 1, s.hidden, s.shared_inter);
  e.weights(&p->shared_down, c.shared_down, 1, s.shared_inter, s.hidden);
  return e.failed;
}

}  // namespace

int64_t cuda_workspace_bytes(const Shape& shape, bool save) { return lay_out(shape, save, nullptr).bytes; }

ArenaLayout cuda_arena_layout(const Shape& shape) { return arena_layout(shape, kCudaTiles); }

int launch_forward(const CudaDriver& driver, const CudaKernels& kernels, const CudaSeats& seats, int32_t seat,
                   const CallOrder::Place& place, const CudaForward& c, void* stream, int multiprocessors) {
  const Shape& s = c.shape;
  const bool save = c.saved[0] != nullptr;
  Workspace w = lay_out(s, save, static_cast<uint8_t*>(c.workspace));
  if (save) w.rows_in = static_cast<uint16_t*>(c.saved[0]);
  const ArenaLayout layout = cuda_arena_layout(s);
  if (s.ranks > 1) {
    uint8_t* const rows = seats.memory(seat) + SeatMemory::rows;
    w.rows_y = reinterpret_cast<uint16_t*>(rows + layout.rows_out);
    w.routes.sorted = reinterpret_cast<int32_t*>(rows + layout.slots);
  }
  const CallState state =
      call_state(seats, seat, place, s, c.timeout_s, c.coords, w.routes.counters + Counter::failed, c.status);
  const Published x{static_cast<const uint16_t*>(c.x), layout.tokens_in};
  const RouteParams route{state, w.routes, s, layout, c.ids, {x, {}}, /*router_weights=*/nullptr, c.tokens_per_expert,
                          c.rows_per_rank, extent_of(s).pairs, shape_digest(s) ^ place.stamp};
  ForwardParams p{};
  if (const int failed = encode_maps(driver, c, w, w.rows_y, &p); failed != 0) return failed;
  fill_movers(c, route, &p);
  p.rows_in[0] = w.rows_in;
  p.rows_out = w.rows_y;
  p.rows_back = w.rows_back;
  p.shared_out = w.shared_y;
  p.sum = static_cast<uint16_t*>(c.y);
  return launch_both(driver, kernels, route, &p, stream, multiprocessors);
}

}  // namespace mok::ffi
