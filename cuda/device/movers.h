// What the spare warps of a kernel do: bring routed rows in, fetch results from their owners, and sum each token's.
//
//   pull      rows of x, dY from their homes -> routed buffers, in the order of the task stream
//   fetch     own results from other ranks -> local buffer, in the order in which owners finish them
//   combine   y_t = shared expert + sum over k, ascending, of w_tk y_tk, or the same of dx without the weights
//
// A kernel says by its hooks what it does besides, or otherwise:
//
//   void pulled(row, rank, slot)              of each lane's row, also padding: slot -1
//   void fetched(slot, owner, row)            of each lane's result
//   float weight(slot)                        of a result in the sum
//   void summed(slot, row)                    of each slot whose result is this rank's own; row -1: no expert
//   void failed(slot)                         of each slot of a token without a result
//
// Rows move by pull only, through registers. All pulls come before the first wait for a peer's results, so two ranks
// cannot wait for each other.
#pragma once

#include "../core/pairs.h"
#include "ptx/convert.h"
#include "wait.h"

// Compile-time shape: MOK_HIDDEN, MOK_TOP_K, MOK_SHARED_INTER.
namespace mok {

using namespace mok::ptx;

constexpr int kVectors = MOK_HIDDEN / 8;  // 16-byte vectors of a row

// Signals of the down tasks of a pair of row blocks.
struct DownSignals {
  uint32_t full, split;
};

// The results of a pair of routed row blocks are complete: tells the ranks whose rows they are. By a warp.
__device__ inline void flag_homes(const MoverParams& p, int64_t pair, int lane) {
  const int32_t ranks = p.call.ranks, me = p.call.coords[0], expert = p.routes.pair_expert[pair];
  const int32_t first = p.routes.pair_row[pair] - p.routes.segment_start[me * p.local_experts + expert];
  const Source* sources = p.routes.sources + int64_t(expert) * ranks;
  const int64_t flag = p.call.seat * p.max_blocks + p.routes.pair_row[pair] / 128;
  __syncwarp();
  __threadfence_system();
  for (int32_t r = lane; r < ranks; r += 32) {
    const int32_t begin = r == 0 ? 0 : sources[r - 1].end;
    if (r == me || begin >= sources[r].end || begin >= first + kPairRows || sources[r].end <= first) continue;
    auto* flags = reinterpret_cast<uint64_t*>(p.routes.peers[r] + SeatMemory::row_flags);
    store_release_sys(flags + flag, p.call.generation);
  }
}

template <class Hooks>
struct Movers {
  const MoverParams& p;
  const Hooks& hooks;
  int lane;

  __device__ int32_t ranks() const { return p.call.ranks; }
  __device__ uint32_t* counter(int64_t word) const { return p.routes.counters + word; }
  __device__ Counter words() const { return {p.max_pairs, p.local_experts}; }
  __device__ uint8_t* rows_of(int32_t rank) const {
    return reinterpret_cast<uint8_t*>(p.routes.peers[rank]) + SeatMemory::rows;
  }

  __device__ uint32_t take(int32_t word) const {
    uint32_t ticket = 0;
    if (lane == 0) ticket = atomicAdd(counter(word), 1u);
    return __shfl_sync(~0u, ticket, 0);
  }

  // A row; from nowhere: zeros.
  __device__ void copy_row(const uint16_t* from, uint16_t* to) const {
    const uint4* src = reinterpret_cast<const uint4*>(from);
    uint4* dst = reinterpret_cast<uint4*>(to);
    for (int v0 = lane; v0 < kVectors; v0 += 32 * 8) {
      uint4 v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i] = src != nullptr && v0 + 32 * i < kVectors ? load_system(src + v0 + 32 * i) : uint4{0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (v0 + 32 * i < kVectors) dst[v0 + 32 * i] = v[i];
    }
  }
  // Row i of the chunk from lane i's address.
  __device__ void copy_rows(const uint16_t* mine, uint16_t* to, int32_t rows) const {
    for (int i = 0; i < rows; ++i) {
      const uint64_t from = __shfl_sync(~0u, reinterpret_cast<uint64_t>(mine), i);
      copy_row(reinterpret_cast<const uint16_t*>(from), to + int64_t{i} * MOK_HIDDEN);
    }
    __threadfence();
    __syncwarp();
  }
  // The last read of a peer's memory in this call lets the peers leave it. If one has left before, by failing, what was
  // read of it may be of its next call.
  __device__ void count_read() const {
    if (ranks() == 1) return;
    const uint32_t chunks = uint32_t(p.routes.totals[Total::rows] / kChunkRows + p.routes.totals[Total::back_chunks]);
    const bool last = lane == 0 && add_acquire_release_gpu(counter(Counter::read), 1) + 1 == chunks;
    if (!__any_sync(~0u, last)) return;
    __syncwarp();
    __threadfence_system();
    int32_t gone = -1;
    for (int32_t r = lane; r < ranks() && gone < 0; r += 32)
      if (!still_here(p.call, r, p.routes.peer_seats[r])) gone = r;
    if (gone >= 0) give_up(p.call, Wait::failure, gone);
    if (__all_sync(~0u, gone < 0)) tell_all(p.call, SeatFlag::finished, p.call.generation, lane, 32);
  }

  // ---- pull ----

  // Whose slot a row of an expert's segment is; slot -1: padding.
  struct Home {
    int32_t rank, slot;
  };
  __device__ Home home_of(int32_t expert, int32_t row) const {
    const Source* sources = p.routes.sources + int64_t(expert) * ranks();
    if (row >= sources[ranks() - 1].end) return {0, -1};
    int32_t r = 0;
    for (int32_t hi = ranks() - 1; r < hi;) {  // the first source that ends behind the row
      const int32_t mid = (r + hi) / 2;
      if (sources[mid].end > row) hi = mid; else r = mid + 1;
    }
    const int32_t place = row + sources[r].shift;
    if (ranks() == 1) return {0, p.routes.sorted[place]};
    const int32_t slot = load_system(reinterpret_cast<const int32_t*>(rows_of(r) + p.layout.slots) + place);
    // else: the peer has given the call up and overwrites its list
    return uint32_t(slot) < uint64_t(p.tokens) * MOK_TOP_K ? Home{r, slot} : Home{0, -1};
  }
  __device__ const uint16_t* row_at(const Published& of, const Home& home) const {
    if (home.slot < 0) return nullptr;
    const bool here = ranks() == 1 || home.rank == p.call.coords[0];
    const uint16_t* tokens = here ? of.tokens : reinterpret_cast<const uint16_t*>(rows_of(home.rank) + of.offset);
    return tokens + int64_t(home.slot / MOK_TOP_K) * MOK_HIDDEN;
  }

  // The row of an expert's segment that comes in its place in the order of the stream.
  __device__ int32_t row_in_turn(int32_t expert, int32_t place) const {
    const int32_t blocks = (p.routes.rows_before(expert, ranks(), ranks()) + 127) / 128;
    const int32_t before = p.routes.rows_before(expert, p.call.coords[0], ranks());
    return place_of_pair(place / kPairRows, blocks, before / kPairRows) * kPairRows + place % kPairRows;
  }

  __device__ void pull() const {
    const int32_t rows = p.routes.totals[Total::rows], first_expert = p.call.coords[0] * p.local_experts;
    for (;;) {
      const int64_t place = int64_t(take(Counter::pull_ticket)) * kChunkRows;
      if (place >= rows) return;
      const int32_t expert = p.routes.pair_expert[p.routes.block_pair[place / 128]];
      const int32_t start = p.routes.segment_start[first_expert + expert], row = row_in_turn(expert, int32_t(place) - start);
      const int64_t first = int64_t{start} + row;
      const int32_t pair = p.routes.block_pair[first / 128];
      const Home home = lane < kChunkRows ? home_of(expert, row + lane) : Home{0, -1};
      if (lane < kChunkRows) hooks.pulled(first + lane, home.rank, home.slot);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (p.published[i].tokens != nullptr)
          copy_rows(row_at(p.published[i], home), p.rows_in[i] + first * MOK_HIDDEN, kChunkRows);
      if (lane == 0) add_release_gpu(counter(words().pulled(pair)), kChunkRows);
      count_read();
    }
  }

  // ---- fetch ----

  __device__ bool wait_for_pair(int32_t owner, int32_t expert, int32_t row_in_segment) const {
    const int64_t block = (p.routes.segment_start[expert] + row_in_segment / kPairRows * kPairRows) / 128;
    const auto* flags = reinterpret_cast<const uint64_t*>(p.call.seat_memory[p.call.seat] + SeatMemory::row_flags);
    const uint64_t* flag = flags + p.routes.peer_seats[owner] * p.max_blocks + block;
    return wait_until(p.call, Wait::rows, owner, [&] { return load_acquire_sys(flag) >= p.call.generation; });
  }

  __device__ void fetch() const {
    const int32_t chunks = p.routes.totals[Total::back_chunks], experts = p.local_experts * ranks(), me = p.call.coords[0];
    for (;;) {
      const int32_t chunk = int32_t(take(Counter::back_ticket));
      if (chunk >= chunks) return;
      const int32_t i = holder(p.routes.back_chunk, experts, chunk), e = back_expert(i, me, ranks(), p.local_experts);
      const int32_t owner = e / p.local_experts, list = p.routes.list_start[e];
      const int32_t at = (chunk - p.routes.back_chunk[i]) * kChunkRows;
      const int32_t n = int32_t(min_of(kChunkRows, p.routes.list_start[e + 1] - list - at));
      const int32_t row = list + at + p.routes.row_shift[e], in_segment = row - p.routes.segment_start[e];
      bool ready = wait_for_pair(owner, e, in_segment);
      if (ready && (in_segment + n - 1) / kPairRows != in_segment / kPairRows) ready = wait_for_pair(owner, e, in_segment + n - 1);
      if (!__all_sync(~0u, ready)) return;
      if (lane < n) hooks.fetched(p.routes.sorted[list + at + lane], owner, row + lane);
      const auto* from = reinterpret_cast<const uint16_t*>(rows_of(owner) + p.layout.rows_out);
      copy_rows(from + int64_t(row + lane) * MOK_HIDDEN, p.rows_back + int64_t(list + at) * MOK_HIDDEN, n);
      if (lane == 0) add_release_gpu(counter(words().back(chunk)), 1);
      count_read();
    }
  }

  // ---- combine ----

  // Address of a slot's result, once it is there; 0: no expert. *ok = false: the call has failed.
  __device__ __noinline__ uint64_t result_of(int64_t slot, const DownSignals& signals, bool* ok) const {
    const int32_t place = p.routes.slot_place[slot];
    if (place < 0) {
      hooks.summed(slot, -1);
      return 0;
    }
    const int32_t e = p.ids[slot], me = p.call.coords[0];
    const uint16_t* rows = p.rows_out;
    int64_t row = place;
    if (e / p.local_experts == me) {
      row += p.routes.row_shift[e];
      const int32_t pair = p.routes.block_pair[row / 128];
      *ok = wait_counter(p.call, counter(words().out(pair)), p.routes.pair_split[pair] ? signals.split : signals.full);
      if (*ok) hooks.summed(slot, row);
    } else {
      rows = p.rows_back;
      const int32_t chunk = p.routes.back_chunk[back_index(e, me, ranks(), p.local_experts)] +
                            (place - p.routes.list_start[e]) / kChunkRows;
      *ok = wait_counter(p.call, counter(words().back(chunk)), 1);
    }
    return reinterpret_cast<uint64_t>(rows + row * MOK_HIDDEN);
  }

  __device__ static float from_bf16(uint32_t half) { return __uint_as_float(half << 16); }

  __device__ static void add(float (&sum)[8], float w, const uint4& q) {
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // the same instruction in every warp, or the bits could differ
      sum[2 * i] = __fmaf_rn(w, from_bf16(words[i] & 0xffff), sum[2 * i]);
      sum[2 * i + 1] = __fmaf_rn(w, from_bf16(words[i] >> 16), sum[2 * i + 1]);
    }
  }

  // What a lane knows of a slot: where its result is (0 = nowhere) and its weight.
  struct Term {
    uint64_t row;
    float weight;
  };
  __device__ Term term_of(int64_t slot) const {
    const uint64_t row = p.routes.slot_result[slot];
    return {row, row == 0 ? 0.0f : hooks.weight(slot)};
  }

  // One token; `mine` are the terms of its first 32 slots, from lane `first` on. Rows are long and far away, so a lane
  // has kDeep loads in flight.
  template <int kDeep>
  __device__ void sum_token(int64_t token, Term mine, int first) const {
    uint4* out = reinterpret_cast<uint4*>(p.sum + token * MOK_HIDDEN);
    const uint16_t* shared = p.shared_out + token * MOK_HIDDEN;
#pragma unroll 1
    for (int v = lane; v - lane < kVectors; v += 32) {
      const bool inside = v < kVectors;
      float sum[8] = {};
      if (MOK_SHARED_INTER > 0 && inside) add(sum, 1.0f, reinterpret_cast<const uint4*>(shared)[v]);
#pragma unroll 1
      for (int k0 = 0; k0 < MOK_TOP_K; k0 += kDeep) {
        if (MOK_TOP_K > 32 && k0 % 32 == 0) mine = k0 + lane < MOK_TOP_K ? term_of(token * MOK_TOP_K + k0 + lane) : Term{};
        uint4 q[kDeep];
#pragma unroll
        for (int k = 0; k < kDeep; ++k) {
          const uint64_t row = k0 + k < MOK_TOP_K ? __shfl_sync(~0u, mine.row, (first + k0 + k) % 32) : 0;
          q[k] = row != 0 && inside ? *(reinterpret_cast<const uint4*>(row) + v) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int k = 0; k < kDeep; ++k)
          if (k0 + k < MOK_TOP_K) add(sum, __shfl_sync(~0u, mine.weight, (first + k0 + k) % 32), q[k]);
      }
      if (inside)
        out[v] = uint4{pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                       pack_bf16(sum[6], sum[7])};
    }
  }
  __device__ void fill_nan(int64_t token) const {
    uint4* out = reinterpret_cast<uint4*>(p.sum + token * MOK_HIDDEN);
    for (int v = lane; v < kVectors; v += 32) out[v] = uint4{~0u, ~0u, ~0u, ~0u};
    for (int k = lane; k < MOK_TOP_K; k += 32) hooks.failed(token * MOK_TOP_K + k);
  }

  __device__ bool shared_ready(int64_t token, const DownSignals& signals) const {
    if (MOK_SHARED_INTER == 0) return true;
    const int64_t pair = p.max_pairs - ceil_div(p.tokens, kPairRows) + token / kPairRows;
    return wait_counter(p.call, counter(words().out(pair)), p.routes.pair_split[pair] ? signals.split : signals.full);
  }

  // Tokens are taken as many at a time as have 32 slots, a lane each.
  template <int kDeep>
  __device__ void combine(const DownSignals& signals) const {
    constexpr int kTokens = MOK_TOP_K < 32 ? 32 / MOK_TOP_K : 1;
    for (;;) {
      const int64_t first = int64_t(take(Counter::combine_ticket)) * kTokens;
      if (first >= p.tokens) return;
      const int n = int(min_of(kTokens, p.tokens - first));
      const int32_t* tokens = p.routes.token_order + first;
      bool ready = !has_failed(p.call);
      for (int i = lane; i < n * MOK_TOP_K && ready; i += 32) {
        const int64_t token = tokens[i / MOK_TOP_K], slot = token * MOK_TOP_K + i % MOK_TOP_K;
        const uint64_t row = result_of(slot, signals, &ready);
        p.routes.slot_result[slot] = row;
        ready = ready && shared_ready(token, signals);
      }
      ready = __all_sync(~0u, ready);
      const bool mine = ready && lane < n * MOK_TOP_K;
      const Term term = mine ? term_of(int64_t{tokens[lane / MOK_TOP_K]} * MOK_TOP_K + lane % MOK_TOP_K) : Term{};
#pragma unroll 1
      for (int i = 0; i < n; ++i)
        if (ready) sum_token<kDeep>(tokens[i], term, i * MOK_TOP_K); else fill_nan(tokens[i]);
      if (ranks() > 1) {
        __threadfence();
        __syncwarp();
        if (lane == 0) add_release_gpu(counter(Counter::combined), uint32_t(n));
      }
    }
  }

  // ---- leave ----

  // One warp: the call is over when every peer has read what it needs of this rank's rows. Ranks leave together, also a
  // call that all of them have judged to fail. Whoever fails alone takes its place back, so that a peer that still is in
  // the call does not take what it reads from now on for this call's.
  __device__ void leave() const {
    auto* copy = reinterpret_cast<uint32_t*>(p.call.seat_memory[p.call.seat] + SeatMemory::copy_words);
    if (lane < 2) copy[lane] = 0;  // the routing kernel is over; the next one finds them zero
    const bool judged = p.routes.totals[Total::judged] != 0;
    bool ok = judged || !has_failed(p.call);
    if (ok && lane == 0 && (judged || p.routes.totals[Total::rows] + p.routes.totals[Total::back_chunks] == 0))
      tell_all(p.call, SeatFlag::finished, p.call.generation);
    for (int32_t r = lane; r < ranks() && ok; r += 32) ok = wait_finished(r, judged);
    if (__all_sync(~0u, ok)) return;
    while (load_acquire_gpu(counter(Counter::combined)) < p.tokens) __nanosleep(1000);
    for (int64_t token = 0; token < p.tokens; ++token) fill_nan(token);
    if (lane == 0) tell_all(p.call, SeatFlag::arrived, pack_place(p.call.generation, kNoPlace));
  }
  __device__ bool wait_finished(int32_t rank, bool judged) const {
    auto finished = [&] {
      return heard(p.call, SeatFlag::finished, p.routes.peer_seats[rank]) >= p.call.generation;
    };
    // who still waits for rows knows better whom to blame
    if (!judged) return wait_until(p.call, Wait::finish, rank, finished, 2);
    const uint64_t start = nanoseconds();  // the call has failed, and that is no reason to leave
    while (!finished()) {
      if (!still_here(p.call, rank, p.routes.peer_seats[rank])) return finished();
      if (nanoseconds() - start > p.call.deadline_ns) return false;
    }
    return true;
  }
};

}  // namespace mok
