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
  failed |= driver.encode(map, base, 2, dims, strides, box);
}

void Encoder::weights(TensorMap* map, const void* base, int64_t experts, int64_t rows, int64_t columns,
                      uint32_t box_rows) {
  const uint64_t dims[] = {uint64_t(columns), uint64_t(rows), uint64_t(experts)};
  const uint64_t strides[] = {uint64_t(columns) * 2, uint64_t(rows) * uint64_t(columns) * 2};
  const uint32_t box[] = {64, box_rows, 1};
  failed |= driver.encode(map, base, 3, dims, strides, box);
}

CallState call_state(const CudaSeats& seats, int32_t seat, uint64_t generation, const Shape& shape, double timeout_s,
                     const int32_t* coords, uint32_t* failed) {
  CallState state{};
  state.generation = generation;
  state.deadline_ns = uint64_t(timeout_s * 1e9);
  state.failed = failed;
  state.host_status = seats.host_status(seat);
  state.coords = coords;
  state.ranks = shape.ranks;
  if (shape.ranks == 1) return state;
  state.seat = seat;
  state.seats = seats.count();
  for (int32_t i = 0; i < seats.count(); ++i) state.seat_memory[i] = seats.memory(i);
  return state;
}

int launch_route(const CudaDriver& driver, void* kernel, const RouteParams& params, void* stream) {
  const unsigned ctas = kRouteCtas * (params.shape.ranks > 1 ? 1 + kCopyClusters : 1);
  const unsigned shared_bytes = unsigned(34 * params.shape.experts + 64) * 4;  // RouteShared in device/route.cu
  return driver.launch(kernel, ctas, kRouteThreads, shared_bytes, stream, const_cast<RouteParams*>(&params));
}

}  // namespace mok::ffi
