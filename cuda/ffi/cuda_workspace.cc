#include "cuda_workspace.h"

namespace mok::ffi {
namespace {

constexpr unsigned kRouteThreads = 1024, kRouteCtas = 8, kCopyClusters = 15;

}  // namespace

Extent extent_of(const Shape& s) {
  const int64_t rows = padded_rows(s, kCudaTiles), blocks = rows / kCudaTiles.block_m;
  const int64_t shared_tokens = s.shared_inter > 0 ? s.tokens : 0;
  return {rows, blocks, blocks + ceil_div(shared_tokens, 2 * kCudaTiles.block_m)};
}

void take_routes(Pieces& p, const Shape& s, int64_t tasks, RouteTables* routes) {
  const Extent extent = extent_of(s);
  p.take(&routes->peers, s.ranks);
  p.take(&routes->peer_seats, s.ranks);
  p.take(&routes->sorted, s.ranks > 1 ? 0 : s.slots());
  p.take(&routes->slot_place, s.slots());
  p.take(&routes->slot_result, s.slots());
  p.take(&routes->token_order, s.tokens);
  p.take(&routes->list_start, s.experts + 1);
  p.take(&routes->counts, s.ranks > 1 ? int64_t{s.ranks} * s.experts : 0);
  p.take(&routes->row_shift, s.experts);
  p.take(&routes->segment_start, s.experts);
  p.take(&routes->back_chunk, s.experts + 1);
  p.take(&routes->sources, s.experts);  // local experts x ranks
  p.take(&routes->block_pair, extent.blocks);
  p.take(&routes->pair_expert, extent.pairs);
  p.take(&routes->pair_row, extent.pairs);
  p.take(&routes->pair_split, extent.pairs);
  p.take(&routes->by_length, s.local_experts());
  if (tasks > 0) p.take(&routes->tasks, extent.pairs * tasks);
  p.take(&routes->totals, Total::count);
  p.take(&routes->counters, Counter::words(extent.pairs, s));
}

void Encoder::rows(TensorMap* map, const void* base, int64_t rows, int64_t columns, uint32_t box_rows) {
  const uint64_t dims[] = {uint64_t(columns), uint64_t(rows)}, strides[] = {uint64_t(columns) * 2};
  const uint32_t box[] = {64, box_rows};
  failed |= driver.encode(map, base, 2, dims, strides, box, 2);
}

void Encoder::weights(TensorMap* map, const void* base, int64_t experts, int64_t rows, int64_t columns,
                      uint32_t box_rows, int32_t elem_bytes) {
  const uint64_t dims[] = {uint64_t(columns), uint64_t(rows), uint64_t(experts)};
  const uint64_t line = uint64_t(columns) * uint64_t(elem_bytes), strides[] = {line, uint64_t(rows) * line};
  const uint32_t box[] = {128 / uint32_t(elem_bytes), box_rows, 1};
  failed |= driver.encode(map, base, 3, dims, strides, box, elem_bytes);
}

CallState call_state(const CudaSeats& seats, int32_t seat, const CallOrder::Place& place, const Shape& shape,
                     double timeout_s, const int32_t* coords, uint32_t* failed, int32_t* status) {
  CallState state{};
  state.generation = place.generation;
  state.acknowledged = place.acknowledged;
  state.deadline_ns = uint64_t(timeout_s * 1e9);
  state.failed = failed;
  state.status = status;
  state.host_status = seats.host_status(seat);
  state.coords = coords;
  state.ranks = shape.ranks;
  if (shape.ranks == 1) return state;
  state.seat = seat;
  state.seats = seats.count();
  for (int32_t i = 0; i < seats.count(); ++i) state.seat_memory[i] = seats.memory(i);
  return state;
}

void fill_movers(const CudaInputs& c, const RouteParams& route, MoverParams* p) {
  const Extent extent = extent_of(c.shape);
  p->call = route.call;
  p->routes = route.routes;
  p->layout = route.layout;
  p->ids = c.ids;
  p->router_weights = c.router_weights;
  for (int i = 0; i < 2; ++i) p->published[i] = route.published[i];
  p->tokens = c.shape.tokens;
  p->local_experts = c.shape.local_experts();
  p->max_rows = extent.rows;
  p->max_pairs = extent.pairs;
  p->max_blocks = extent.blocks;
}

int launch_both(const CudaDriver& driver, const CudaKernels& kernels, const RouteParams& route, MoverParams* main,
                void* stream, int multiprocessors) {
  const bool exchange = route.shape.ranks > 1;
  const unsigned ctas = kRouteCtas * (exchange ? 1 + kCopyClusters : 1);
  const unsigned shared_bytes = unsigned(34 * route.shape.experts + 64) * 4;  // RouteShared in device/route.cu
  int failed = driver.launch(kernels.route, ctas, kRouteThreads, shared_bytes, stream, const_cast<RouteParams*>(&route));
  if (failed != 0) return failed;
  failed = driver.launch(kernels.main, unsigned(multiprocessors) / 2 * 2, kMainThreads, kMainShared, stream, main);
  // what the main kernel would have left zero for the next call
  if (failed != 0 && exchange) driver.zero(route.call.seat_memory[route.call.seat] + SeatMemory::copy_words, 8, stream);
  return failed;
}

}  // namespace mok::ffi
