#include "cuda_backward.h"

#include "../device/backward_params.h"

namespace mok::ffi {
namespace {

constexpr uint32_t kLoadRows = 64, kStoreRows = 16;
constexpr int64_t kDotColumns = 256;  // of I, that one partial product covers

// Arrays over the routed rows, or over the tokens for the shared expert.
struct Arrays {
  uint16_t *x, *dy, *g, *u, *d_g, *d_u, *hw, *dx;
};

struct Workspace {
  Arrays routed, shared;
  uint16_t* rows_back;
  float *row_weight, *dots, *row_dw;
  RouteTables routes;
  int32_t *tokens_per_expert, *rows_per_rank, *status;
  int64_t bytes;
};

void take_wide(Pieces& p, int64_t elements, bool recompute, Arrays* a) {
  p.take(&a->d_g, elements);
  p.take(&a->d_u, elements);
  p.take(&a->hw, elements);
  if (!recompute) return;
  p.take(&a->g, elements);
  p.take(&a->u, elements);
}

Workspace lay_out(const Shape& s, bool recompute, uint8_t* base) {
  Pieces p(base);
  Workspace w{};
  const bool exchange = s.ranks > 1;
  const int64_t rows = extent_of(s).rows, hidden = rows * s.hidden, shared_tokens = s.shared_inter > 0 ? s.tokens : 0;
  if (recompute) p.take(&w.routed.x, hidden);
  p.take(&w.routed.dy, hidden);
  p.take(&w.routed.dx, exchange ? 0 : hidden);
  p.take(&w.rows_back, exchange ? s.slots() * s.hidden : 0);
  p.take(&w.shared.dx, shared_tokens * s.hidden);
  take_wide(p, rows * s.inter, recompute, &w.routed);
  take_wide(p, shared_tokens * s.shared_inter, recompute, &w.shared);
  p.take(&w.row_weight, rows);
  p.take(&w.dots, rows * ceil_div(s.inter, kDotColumns));
  p.take(&w.row_dw, exchange ? 0 : rows);
  take_routes(p, s, /*tasks=*/0, &w.routes);
  p.take(&w.tokens_per_expert, s.experts);
  p.take(&w.rows_per_rank, s.ranks);
  p.take(&w.status, 1);
  w.bytes = p.bytes();
  return w;
}

// The work space, with what stands elsewhere: saved arrays, and what peers read.
Workspace find_arrays(const CudaBackward& c, const ArenaLayout& layout, uint8_t* arena) {
  const bool recompute = c.saved[0] == nullptr;
  Workspace w = lay_out(c.shape, recompute, static_cast<uint8_t*>(c.workspace));
  if (!recompute) {
    uint16_t** const places[] = {&w.routed.x, &w.routed.g, &w.routed.u, &w.shared.g, &w.shared.u};
    for (int i = 0; i < 5; ++i) *places[i] = static_cast<uint16_t*>(c.saved[i]);
  }
  w.shared.x = static_cast<uint16_t*>(const_cast<void*>(c.x));
  w.shared.dy = static_cast<uint16_t*>(const_cast<void*>(c.dy));
  if (arena != nullptr) {
    w.routed.dx = reinterpret_cast<uint16_t*>(arena + layout.rows_out);
    w.row_dw = reinterpret_cast<float*>(arena + layout.weight_grads);
    w.routes.sorted = reinterpret_cast<int32_t*>(arena + layout.slots);
  }
  return w;
}

struct WeightArrays {
  const void *gate, *up, *down;
  void *d_gate, *d_up, *d_down;
  int32_t grad_bytes;
};

int encode_maps(const CudaDriver& driver, const Arrays& a, const WeightArrays& w, int64_t rows, int64_t experts,
                int64_t hidden, int64_t inter, BackwardMaps* m) {
  Encoder e{driver};
  auto both = [&](TensorMap* load, TensorMap* store, const void* base, int64_t columns) {
    if (load != nullptr) e.weights(load, base, 1, rows, columns, kLoadRows);
    if (store != nullptr) e.weights(store, base, 1, rows, columns, kStoreRows);
  };
  both(&m->x, nullptr, a.x, hidden);
  both(&m->dy, nullptr, a.dy, hidden);
  both(&m->g, &m->to_g, a.g, inter);
  both(&m->u, &m->to_u, a.u, inter);
  both(&m->d_g, &m->to_d_g, a.d_g, inter);
  both(&m->d_u, &m->to_d_u, a.d_u, inter);
  both(&m->hw, &m->to_hw, a.hw, inter);
  both(nullptr, &m->to_dx, a.dx, hidden);
  e.weights(&m->w_gate, w.gate, experts, hidden, inter, kLoadRows);
  e.weights(&m->w_up, w.up, experts, hidden, inter, kLoadRows);
  e.weights(&m->w_down, w.down, experts, inter, hidden, kLoadRows);
  e.weights(&m->to_gate_grad, w.d_gate, experts, hidden, inter, kStoreRows, w.grad_bytes);
  e.weights(&m->to_up_grad, w.d_up, experts, hidden, inter, kStoreRows, w.grad_bytes);
  e.weights(&m->to_down_grad, w.d_down, experts, inter, hidden, kStoreRows, w.grad_bytes);
  return e.failed;
}

BackwardParams backward_params(const CudaBackward& c, const Workspace& w, const RouteParams& route) {
  const Shape& s = c.shape;
  BackwardParams p{};
  fill_movers(c, route, &p);
  p.rows_in[0] = w.routed.dy;
  p.rows_in[1] = w.routed.x;
  p.rows_out = w.routed.dx;
  p.rows_back = w.rows_back;
  p.shared_out = w.shared.dx;
  p.sum = static_cast<uint16_t*>(c.dx);
  p.row_weight = w.row_weight;
  p.dots = w.dots;
  p.row_dw = w.row_dw;
  p.dw = static_cast<float*>(c.dw);
  const int64_t routed = s.local_experts() * s.hidden * s.inter * c.weight_grad_bytes;
  const int64_t shared = s.hidden * s.shared_inter * c.weight_grad_bytes;
  const Span grads[] = {{c.d_gate, routed},        {c.d_up, routed},        {c.d_down, routed},
                        {c.d_shared_gate, shared}, {c.d_shared_up, shared}, {c.d_shared_down, shared}};
  for (int i = 0; i < BackwardParams::kWeightGrads; ++i) p.weight_grads[i] = grads[i];
  return p;
}

}  // namespace

int64_t cuda_backward_bytes(const Shape& shape, bool recompute) { return lay_out(shape, recompute, nullptr).bytes; }

int launch_backward(const CudaDriver& driver, const CudaKernels& kernels, const CudaSeats& seats, int32_t seat,
                    const CallOrder::Place& place, const CudaBackward& c, void* stream, int multiprocessors) {
  const Shape& s = c.shape;
  const ArenaLayout layout = cuda_arena_layout(s);
  const Workspace w = find_arrays(c, layout, s.ranks > 1 ? seats.memory(seat) + SeatMemory::rows : nullptr);
  const CallState state =
      call_state(seats, seat, place, s, c.timeout_s, c.coords, w.routes.counters + Counter::failed, w.status);
  const Published dy{static_cast<const uint16_t*>(c.dy), layout.grads_in};
  const Published x{c.saved[0] == nullptr ? static_cast<const uint16_t*>(c.x) : nullptr, layout.tokens_in};
  const RouteParams route{state, w.routes, s, layout, c.ids, {dy, x}, c.router_weights, w.tokens_per_expert,
                          w.rows_per_rank, extent_of(s).pairs, shape_digest(s) ^ place.stamp};
  BackwardParams p = backward_params(c, w, route);
  int failed = encode_maps(driver, w.routed,
                           {c.gate, c.up, c.down, c.d_gate, c.d_up, c.d_down, c.weight_grad_bytes}, p.max_rows,
                           s.local_experts(), s.hidden, s.inter, &p.routed);
  if (s.shared_inter > 0)
    failed |= encode_maps(driver, w.shared,
                          {c.shared_gate, c.shared_up, c.shared_down, c.d_shared_gate, c.d_shared_up, c.d_shared_down,
                           c.weight_grad_bytes},
                          s.tokens, 1, s.hidden, s.shared_inter, &p.shared);
  return failed != 0 ? failed : launch_both(driver, kernels, route, &p, stream, multiprocessors);
}

}  // namespace mok::ffi
