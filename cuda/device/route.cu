// Routing prologue: the ids of this rank's tokens become its sorted slot list, the ranks exchange their counts, and the
// counts become the tables of the main kernel.
//
//   cluster 0        ids -> counts per (warp, expert) -> sorted list | publish, hear the peers -> tables -> tasks
//                    tokens by their last expert -> the order in which they are summed
//   all clusters     what peers pull rows of -> arena, in pieces off one ticket
//
// The order of rows is that of core/routing.h: by expert, then rank, then slot. Integers only, so any schedule of
// threads gives the same tables. Nothing waits for a block that may not be running, other than those of cluster 0.
#include "../core/pairs.h"
#include "wait.h"

// Compile-time shape: MOK_HIDDEN, MOK_INTER, MOK_TOP_K, MOK_SHARED_INTER.
namespace mok {

using namespace mok::ptx;

constexpr int kThreads = 1024, kWarps = kThreads / 32, kCtas = 8;
constexpr int kHidden = MOK_HIDDEN, kTopK = MOK_TOP_K, kBlockM = 128;
constexpr int kGateUpTiles = (MOK_INTER + 127) / 128, kSharedTiles = (MOK_SHARED_INTER + 127) / 128;
constexpr int kDownTiles = (MOK_HIDDEN + 255) / 256;
constexpr int kTasksAhead = 128;  // between the two GEMMs of a pair: about two for each cluster of the grid
constexpr int kAges = 32;         // by which tokens are sorted: when the last of their experts is worked on
constexpr int64_t kPieceVectors = 4 * kThreads;
constexpr int32_t kNone = 0x7fffffff;

// Dynamic shared memory, [experts] ints each; the counts per warp first.
struct RouteShared {
  int32_t* memory;
  int32_t experts;
  __device__ int32_t* count(int warp) const { return memory + warp * experts; }  // then: the warp's next place
  __device__ int32_t* rows() const { return memory + kWarps * experts; }         // of this CTA
  __device__ int32_t* first() const { return rows() + experts; }                 // where this CTA's slots start
  // After the lists are made, the counts make room: [experts + 1] each.
  __device__ int32_t* table(int i) const { return memory + i * (experts + 1); }
};
struct RouteWords {
  int32_t bad;  // first slot whose id is out of range
  int32_t warp_sums[kWarps];
  int32_t age_count[kWarps][kAges];  // tokens; then: the warp's next place
  int32_t age_total[kAges];          // of this CTA
  int32_t age_first[kAges];          // where this CTA's tokens start
};

// Exclusive prefix sum of one value per thread.
__device__ __noinline__ int32_t scan(int32_t value, RouteWords& words) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int32_t sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const int32_t up = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += up;
  }
  __syncthreads();
  if (lane == 31) words.warp_sums[warp] = sum;
  __syncthreads();
  int32_t before = lane < warp ? words.warp_sums[lane] : 0;
  for (int d = 16; d > 0; d /= 2) before += __shfl_xor_sync(~0u, before, d);
  return before + sum - value;
}

// out[0 .. n] = prefix sums of value(i). n <= kThreads - 1, or n == kThreads with the total written by the last thread.
template <class Value>
__device__ void prefix(int32_t* out, int32_t n, RouteWords& words, Value value) {
  const int32_t i = threadIdx.x, v = i < n ? value(i) : 0, before = scan(v, words);
  if (i < n) out[i] = before;
  if (i == n - 1) out[n] = before + v;
  __syncthreads();
}

// ---- the sorted list ----

// Slots of one warp of the cluster, 32 at a time and in order; each lane learns which lanes have its expert, and how many
// of them are earlier.
template <class Visit>
__device__ void for_each_slot(const RouteParams& p, uint32_t cta, Visit visit) {
  constexpr int kAhead = 8;  // loads in flight
  const int lane = threadIdx.x & 31, part = int(cta) * kWarps + int(threadIdx.x >> 5);
  const int64_t slots = p.shape.slots(), share = align_up(ceil_div(slots, kWarps * kCtas), 32);
  const int64_t end = min_of(slots, (part + 1) * share);
  for (int64_t base = part * share; base < end; base += 32 * kAhead) {
    int32_t ids[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ids[i] = base + 32 * i + lane < end ? p.ids[base + 32 * i + lane] : -1;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t slot = base + 32 * i + lane;
      // lanes behind the end must not be in a mask that the others wait for
      const uint32_t same = __match_any_sync(~0u, ids[i]) & __ballot_sync(~0u, slot < end);
      if (slot < end) visit(slot, ids[i], __popc(same & ((1u << lane) - 1)), same);
      __syncwarp();
    }
  }
}

__device__ void count(const RouteParams& p, const RouteShared& sh, RouteWords& words, uint32_t cta) {
  int32_t* mine = sh.count(threadIdx.x >> 5);
  for (int e = threadIdx.x & 31; e < sh.experts; e += 32) mine[e] = 0;
  __syncwarp();
  for_each_slot(p, cta, [&](int64_t slot, int32_t id, int before, uint32_t same) {
    if (id >= 0 && id < sh.experts) {
      if (before == 0) mine[id] += __popc(same);
    } else if (id != -1) {
      atomicMin(&words.bad, int32_t(slot));
    }
  });
}

// Where each warp's slots of each expert start in the list. CTA 0 keeps the starts of the experts.
__device__ void lay_out_list(const RouteParams& p, const RouteShared& sh, RouteWords& words, uint32_t cta) {
  const int32_t e = threadIdx.x;
  if (e < sh.experts) {
    int32_t rows = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t n = sh.count(w)[e];
      sh.count(w)[e] = rows;
      rows += n;
    }
    sh.rows()[e] = rows;
  }
  cluster_sync();
  int32_t before = 0, total = 0;
  if (e < sh.experts)
    for (uint32_t c = 0; c < kCtas; ++c) {
      const int32_t n = int32_t(load_shared_at(shared_address(sh.rows() + e), c));
      if (c < cta) before += n;
      total += n;
    }
  const int32_t start = scan(total, words);
  if (e < sh.experts) sh.first()[e] = start + before;
  if (cta == 0 && e < sh.experts) {
    p.routes.list_start[e] = start;
    if (e == sh.experts - 1) p.routes.list_start[sh.experts] = start + total;
    if (p.shape.ranks > 1)
      reinterpret_cast<int32_t*>(p.call.seat_memory[p.call.seat] + SeatMemory::rows + p.layout.counts)[e] = total;
  }
  __syncthreads();
}

__device__ void place_slots(const RouteParams& p, const RouteShared& sh, uint32_t cta) {
  int32_t* next = sh.count(threadIdx.x >> 5);
  float* weights = nullptr;  // for peers
  if (p.shape.ranks > 1 && p.router_weights != nullptr)
    weights = reinterpret_cast<float*>(p.call.seat_memory[p.call.seat] + SeatMemory::rows + p.layout.weights);
  for_each_slot(p, cta, [&](int64_t slot, int32_t id, int before, uint32_t same) {
    const bool real = id >= 0 && id < sh.experts;
    const int32_t place = real ? sh.first()[id] + next[id] + before : -1;
    if (real) p.routes.sorted[place] = int32_t(slot);
    p.routes.slot_place[slot] = place;
    if (weights != nullptr) weights[slot] = p.router_weights[slot];
    __syncwarp(same);
    if (real && before == 0) next[id] += __popc(same);
  });
}

// ---- the order of tokens ----

// Experts of a rank are worked on in their order, on all ranks alike.
__device__ int32_t age_of(const RouteParams& p, int64_t token) {
  const int32_t local = p.shape.local_experts();
  int32_t last = 0;
  for (int k = 0; k < kTopK; ++k) {
    const int32_t id = p.ids[token * kTopK + k];
    if (id >= 0 && id < p.shape.experts && id % local > last) last = id % local;
  }
  return last * kAges / local;
}

template <class Visit>
__device__ void for_each_token(const RouteParams& p, uint32_t cta, Visit visit) {
  const int lane = threadIdx.x & 31, part = int(cta) * kWarps + int(threadIdx.x >> 5);
  const int64_t share = align_up(ceil_div(p.shape.tokens, kWarps * kCtas), 32);
  const int64_t end = min_of(p.shape.tokens, (part + 1) * share);
  for (int64_t base = part * share; base < end; base += 32) {
    const int64_t token = base + lane;
    const int32_t age = token < end ? age_of(p, token) : -1;
    const uint32_t same = __match_any_sync(~0u, age) & __ballot_sync(~0u, token < end);
    if (token < end) visit(token, age, __popc(same & ((1u << lane) - 1)), same);
    __syncwarp();
  }
}

__device__ void count_ages(const RouteParams& p, RouteWords& words, uint32_t cta) {
  int32_t* mine = words.age_count[threadIdx.x >> 5];
  mine[threadIdx.x & 31] = 0;
  __syncwarp();
  for_each_token(p, cta, [&](int64_t, int32_t age, int before, uint32_t same) {
    if (before == 0) mine[age] += __popc(same);
  });
  __syncthreads();
  if (threadIdx.x < kAges) {
    int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t n = words.age_count[w][threadIdx.x];
      words.age_count[w][threadIdx.x] = sum;
      sum += n;
    }
    words.age_total[threadIdx.x] = sum;
  }
}

// After all CTAs have counted.
__device__ void order_tokens(const RouteParams& p, RouteWords& words, uint32_t cta) {
  if (threadIdx.x < kAges) {
    int32_t before = 0, total = 0;
    for (uint32_t c = 0; c < kCtas; ++c) {
      const int32_t n = int32_t(load_shared_at(shared_address(words.age_total + threadIdx.x), c));
      if (c < cta) before += n;
      total += n;
    }
    int32_t start = total;
    for (int d = 1; d < kAges; d *= 2) {
      const int32_t up = __shfl_up_sync(~0u, start, d);
      if (int(threadIdx.x) >= d) start += up;
    }
    words.age_first[threadIdx.x] = start - total + before;
  }
  __syncthreads();
  int32_t* next = words.age_count[threadIdx.x >> 5];
  for_each_token(p, cta, [&](int64_t token, int32_t age, int before, uint32_t same) {
    p.routes.token_order[words.age_first[age] + next[age] + before] = int32_t(token);
    __syncwarp(same);
    if (before == 0) next[age] += __popc(same);
  });
}

// ---- the exchange ----

__device__ Verdict* verdict_of(const RouteParams& p, uint8_t* memory) {
  return reinterpret_cast<Verdict*>(memory + SeatMemory::rows + p.layout.verdict);
}

__device__ Status judge_ids(const RouteParams& p, const RouteWords& words) {
  int32_t bad = kNone;
  for (uint32_t c = 0; c < kCtas; ++c) bad = int32_t(min_of(bad, load_shared_at(shared_address(&words.bad), c)));
  if (bad == kNone) return {};
  return bad_id(p.call.coords[0], {bad / kTopK, bad % kTopK, p.shape.experts, p.ids[bad]});
}

// All that peers will read is there when the last piece is.
__device__ void count_published(const RouteParams& p, uint32_t pieces) {
  __syncthreads();
  if (threadIdx.x >= 32) return;
  auto* words = reinterpret_cast<uint32_t*>(p.call.seat_memory[p.call.seat] + SeatMemory::copy_words);
  __threadfence();
  const bool last = threadIdx.x == 0 && add_acquire_release_gpu(words + 1, 1) + 1 == pieces;
  if (!__any_sync(~0u, last)) return;
  __syncwarp();
  tell_all(p.call, SeatFlag::published, p.call.generation, int(threadIdx.x), 32);
}

// Piece by piece, the first array, then the second.
__device__ void copy_tokens(const RouteParams& p, bool sorted_here) {
  __shared__ uint32_t piece;
  uint8_t* const mine = p.call.seat_memory[p.call.seat];
  const int64_t vectors = p.shape.tokens * kHidden / 8;
  const uint32_t each = uint32_t(ceil_div(vectors, kPieceVectors)), pieces = p.published[1].tokens == nullptr ? each : 2 * each;
  if (sorted_here) count_published(p, pieces + kCtas);
  for (;;) {
    if (threadIdx.x == 0) piece = atomicAdd(reinterpret_cast<uint32_t*>(mine + SeatMemory::copy_words), 1u);
    __syncthreads();
    if (piece >= pieces) return;
    const Published& array = p.published[piece / each];
    const uint4* from = reinterpret_cast<const uint4*>(array.tokens);
    uint4* to = reinterpret_cast<uint4*>(mine + SeatMemory::rows + array.offset);
    const int64_t first = piece % each * kPieceVectors;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i * kThreads + threadIdx.x < vectors) v[i] = __ldg(from + first + i * kThreads + threadIdx.x);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i * kThreads + threadIdx.x < vectors) to[first + i * kThreads + threadIdx.x] = v[i];
    count_published(p, pieces + kCtas);
  }
}

// Finds each rank's seat and waits for what it has published. One thread per rank.
__device__ bool find_peers(const RouteParams& p) {
  bool ok = true;
  const int32_t r = threadIdx.x;
  if (r < p.shape.ranks) {
    int32_t seat = -1;
    ok = wait_until(p.call, Wait::routes, r, [&] {
      for (seat = p.call.seats - 1; seat >= 0 && !still_here(p.call, r, seat);) --seat;
      return seat >= 0;
    });
    ok = ok && wait_until(p.call, Wait::routes, r, [&] {
      return heard(p.call, SeatFlag::published, seat) >= p.call.generation;
    });
    if (ok) {
      p.routes.peers[r] = reinterpret_cast<uint64_t>(p.call.seat_memory[seat]);
      p.routes.peer_seats[r] = seat;
    }
  }
  return __syncthreads_and(ok);
}

// The first rank, in rank order, whose call cannot go on. Every rank finds the same.
__device__ Status judge_peers(const RouteParams& p) {
  for (int32_t r = 0; r < p.shape.ranks; ++r) {
    const volatile Verdict* v = verdict_of(p, reinterpret_cast<uint8_t*>(p.routes.peers[r]));
    if (v->shape_digest != p.digest) return {Code::shape_mismatch, r, 0, 0};
    if (v->status.code != Code::ok) return {v->status.code, v->status.rank, v->status.value, v->status.extra};
  }
  return {};
}

__device__ void copy_counts(const RouteParams& p) {
  for (int32_t i = threadIdx.x; i < p.shape.ranks * p.shape.experts; i += kThreads) {
    const uint64_t memory = p.routes.peers[i / p.shape.experts] + SeatMemory::rows + p.layout.counts;
    p.routes.counts[i] = load_system(reinterpret_cast<const int32_t*>(memory) + i % p.shape.experts);
  }
}

// Verdicts and counts of the peers. False: one of them has left the call meanwhile, and what was read may be of another.
__device__ bool read_peers(const RouteParams& p, Status* status) {
  __shared__ Status judged;
  if (!find_peers(p)) return false;
  if (threadIdx.x == 0) judged = judge_peers(p);
  copy_counts(p);
  __threadfence_system();
  __syncthreads();
  *status = judged;
  const int32_t r = threadIdx.x;
  const bool ok = r >= p.shape.ranks || still_here(p.call, r, p.routes.peer_seats[r]);
  if (!ok) give_up(p.call, Wait::failure, r);
  return __syncthreads_and(ok);
}

// ---- tables ----

// Own slots of an expert, and those of any rank.
__device__ int32_t own_count(const RouteParams& p, int32_t e) {
  return p.routes.list_start[e + 1] - p.routes.list_start[e];
}
__device__ int32_t count_of(const RouteParams& p, int32_t rank, int32_t e) {
  return p.shape.ranks == 1 ? own_count(p, e) : p.routes.counts[rank * p.shape.experts + e];
}

// lists[expert of mine * ranks + r] = where the expert starts in rank r's list. A warp per rank.
__device__ void find_lists(const RouteParams& p, int32_t* lists) {
  const int lane = threadIdx.x & 31;
  const int32_t ranks = p.shape.ranks, local = p.shape.local_experts(), first = p.call.coords[0] * local;
  for (int32_t r = threadIdx.x >> 5; r < ranks; r += kWarps) {
    int32_t at = 0;
    for (int32_t base = 0; base < first + local; base += 32) {
      const int32_t e = base + lane, n = e < first + local ? count_of(p, r, e) : 0;
      int32_t sum = n;
      for (int d = 1; d < 32; d *= 2) {
        const int32_t up = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += up;
      }
      if (e >= first && e < first + local) lists[(e - first) * ranks + r] = at + sum - n;
      at += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
}

// Tables over the experts. Returns the rows of this thread's expert.
__device__ int32_t describe_experts(const RouteParams& p, const RouteShared& sh, RouteWords& words) {
  const int32_t ranks = p.shape.ranks, local = p.shape.local_experts(), me = p.call.coords[0], e = threadIdx.x;
  int32_t *lists = sh.table(0), *aligned = sh.table(1), *all = sh.table(2);
  find_lists(p, lists);
  int32_t rows = 0, before = 0;
  if (e < sh.experts)
    for (int32_t r = 0; r < ranks; ++r) {
      const int32_t n = count_of(p, r, e);
      if (r < me) before += n;
      if (e / local == me) {
        const int32_t i = e % local * ranks + r;
        p.routes.sources[i] = {rows + n, lists[i] - rows};
      }
      rows += n;
    }
  prefix(all, sh.experts, words, [&](int32_t) { return rows; });
  prefix(aligned, sh.experts, words, [&](int32_t) { return int32_t(align_up(rows, kBlockM)); });
  if (e < sh.experts) {
    const int32_t start = aligned[e] - aligned[e / local * local];
    p.tokens_per_expert[e] = rows;
    p.routes.segment_start[e] = start;
    p.routes.row_shift[e] = start + before - p.routes.list_start[e];
  }
  prefix(p.routes.back_chunk, sh.experts, words, [&](int32_t i) {
    return i % ranks == 0 ? 0 : int32_t(ceil_div(own_count(p, back_expert(i, me, ranks, local)), kChunkRows));
  });
  return rows;
}

__device__ Status judge_capacity(const RouteParams& p, const RouteShared& sh) {
  const int32_t local = p.shape.local_experts(), *all = sh.table(2);
  Status s;
  for (int32_t r = 0; r < p.shape.ranks; ++r) {
    const int32_t rows = all[(r + 1) * local] - all[r * local];
    if (threadIdx.x == 0) p.rows_per_rank[r] = rows;
    if (s.ok() && rows > p.shape.max_rows) s = {Code::over_capacity, r, rows, p.shape.max_rows};
  }
  return s;
}

__device__ PairSegments describe_pairs(const RouteParams& p, const RouteShared& sh, RouteWords& words, int32_t rows) {
  const int32_t local = p.shape.local_experts(), first_expert = p.call.coords[0] * local;
  int32_t *blocks = sh.table(3), *pair = sh.table(4), *group = sh.table(5), *split = sh.table(6);
  if (int32_t(threadIdx.x) / local == p.call.coords[0] && threadIdx.x < sh.experts)
    blocks[threadIdx.x - first_expert] = int32_t(ceil_div(rows, kBlockM));
  __syncthreads();
  prefix(pair, local, words, [&](int32_t e) { return pairs_of(blocks[e]); });
  prefix(group, local, words, [&](int32_t e) { return groups_of(blocks[e]); });
  prefix(split, local, words, [&](int32_t e) { return splits_of(blocks[e]); });
  for (int32_t i = threadIdx.x; i < pair[local]; i += kThreads) {
    const int32_t e = holder(pair, local, i), before = p.routes.rows_before(e, p.call.coords[0], p.shape.ranks);
    const int32_t at = place_of_pair(i - pair[e], blocks[e], before / kPairRows), n = blocks[e] - 2 * at;
    const int32_t row = p.routes.segment_start[first_expert + e] + at * kPairRows;
    p.routes.pair_expert[i] = e;
    p.routes.pair_row[i] = row;
    p.routes.pair_split[i] = n == 1;
    p.routes.block_pair[row / kBlockM] = i;
    if (n > 1) p.routes.block_pair[row / kBlockM + 1] = i;
  }
  return {pair, group, split, local};
}

// The tasks of a stream, a warp for each group.
__device__ __noinline__ void deal_tasks(PairTask* tasks, const PairStream& s, int32_t shared, int32_t first_pair) {
  const int lane = threadIdx.x & 31;
  for (int32_t g = threadIdx.x >> 5; g < s.segments.groups(); g += kWarps) {
    const PairGroup group = pair_group(s.segments, g);
    auto deal = [&](PairTask* to, int32_t kind, int32_t tiles) {
      for (int32_t i = lane; i < tasks_of_group(group, tiles); i += 32) {
        const PairTile t = pair_tile(group, tiles, i);
        to[i] = {kind | shared, group.expert, first_pair + t.pair, t.tile};
      }
    };
    deal(tasks + s.first_offset(g), 0, s.first_tiles);
    deal(tasks + s.second_offset(g), 1, s.second_tiles);
  }
}

__device__ void order_experts(const RouteParams& p, const RouteShared& sh) {
  const int32_t local = p.shape.local_experts(), e = threadIdx.x, *all = sh.table(2) + p.call.coords[0] * local;
  if (e >= local) return;
  auto rows = [&](int32_t i) { return all[i + 1] - all[i]; };
  int32_t place = 0;
  for (int32_t other = 0; other < local; ++other)
    place += rows(other) > rows(e) || (rows(other) == rows(e) && other < e);
  p.routes.by_length[place] = e;
}

// The shared expert's rows are the local tokens; its pairs follow the routed ones.
__device__ void describe_shared(const RouteParams& p) {
  const int32_t blocks = int32_t(ceil_div(p.shape.tokens, kBlockM)), routed = int32_t(p.max_pairs) - pairs_of(blocks);
  for (int32_t i = threadIdx.x; i < pairs_of(blocks); i += kThreads) {
    p.routes.pair_row[routed + i] = i * 2 * kBlockM;
    p.routes.pair_split[routed + i] = blocks - 2 * i == 1;
  }
}

// The shared expert first: its tasks fill the wait for the first routed rows.
__device__ int32_t deal_shared(const RouteParams& p, const RouteShared& sh) {
  const int32_t blocks = int32_t(ceil_div(p.shape.tokens, kBlockM)), routed = int32_t(p.max_pairs) - pairs_of(blocks);
  int32_t* first = sh.table(7);
  if (threadIdx.x == 0) {
    first[0] = first[2] = first[4] = 0;
    first[1] = pairs_of(blocks);
    first[3] = groups_of(blocks);
    first[5] = splits_of(blocks);
  }
  __syncthreads();
  const PairSegments one{first, first + 2, first + 4, 1};
  const PairStream stream{one, kSharedTiles, kDownTiles, lag_for(one, kSharedTiles, kTasksAhead)};
  deal_tasks(p.routes.tasks, stream, 2, routed);
  return stream.count();
}

__device__ int32_t deal_all(const RouteParams& p, const RouteShared& sh, const PairSegments& segments) {
  const int32_t shared = MOK_SHARED_INTER > 0 ? deal_shared(p, sh) : 0;
  const PairStream stream{segments, kGateUpTiles, kDownTiles, lag_for(segments, kGateUpTiles, kTasksAhead)};
  deal_tasks(p.routes.tasks + shared, stream, 0, 0);
  return shared + stream.count();
}

// ---- the call ----

__device__ void end_with(const RouteParams& p, const Status& status, int32_t tasks, int32_t rows, int32_t pairs) {
  if (status.code != Code::ok && status.code != Code::over_capacity) {  // nothing is known of the counts
    for (int32_t e = threadIdx.x; e < p.shape.experts; e += kThreads) p.tokens_per_expert[e] = 0;
    for (int32_t r = threadIdx.x; r < p.shape.ranks; r += kThreads) p.rows_per_rank[r] = 0;
  }
  if (threadIdx.x != 0) return;
  p.routes.totals[Total::tasks] = tasks;
  p.routes.totals[Total::rows] = rows;
  p.routes.totals[Total::pairs] = pairs;
  p.routes.totals[Total::back_chunks] = status.ok() ? p.routes.back_chunk[p.shape.experts] : 0;
  p.routes.totals[Total::judged] = !status.ok() && !has_failed(p.call);
  if (status.ok()) *p.call.status = int32_t(Code::ok); else fail(p.call, status);
}

__device__ void make_tables(const RouteParams& p, const RouteShared& sh, RouteWords& words, Status status) {
  // no more than that it has failed is known of a call that lost its peers: why was said where it happened
  if (p.shape.ranks > 1 && (!__syncthreads_and(!has_failed(p.call)) || !read_peers(p, &status)))
    return end_with(p, {Code::peer_failed, 0, 0, 0}, 0, 0, 0);
  if (!status.ok()) return end_with(p, status, 0, 0, 0);
  const int32_t rows = describe_experts(p, sh, words);
  status = judge_capacity(p, sh);
  if (!status.ok()) return end_with(p, status, 0, 0, 0);
  const PairSegments segments = describe_pairs(p, sh, words, rows);
  order_experts(p, sh);
  if (MOK_SHARED_INTER > 0) describe_shared(p);
  const int32_t tasks = p.routes.tasks == nullptr ? 0 : deal_all(p, sh, segments);
  const int32_t *aligned = sh.table(1), local = p.shape.local_experts(), first = p.call.coords[0] * local;
  end_with(p, status, tasks, aligned[first + local] - aligned[first], segments.pairs());
}

__device__ void arrive(const RouteParams& p) {
  for (int64_t i = threadIdx.x; i < Counter::words(p.max_pairs, p.shape); i += kThreads) p.routes.counters[i] = 0;
  __syncthreads();
  if (threadIdx.x >= 32 || p.shape.ranks == 1) return;
  tell_all(p.call, SeatFlag::arrived, place_in(p.call, p.call.coords[0]), int(threadIdx.x), 32);
  __syncwarp();
  if (threadIdx.x == 0) skip_behind_failure(p.call);
}

}  // namespace mok

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(1024, 1)
    mok_route(const __grid_constant__ mok::RouteParams p) {
  using namespace mok;
  extern __shared__ __align__(16) int32_t memory[];
  __shared__ RouteWords words;
  const RouteShared sh{memory, p.shape.experts};
  const bool sorts = blockIdx.x < kCtas, leads = blockIdx.x == 0;
  Status status;
  if (sorts) {
    if (leads) arrive(p);
    if (threadIdx.x == 0) words.bad = kNone;
    __syncthreads();
    count(p, sh, words, blockIdx.x);
    count_ages(p, words, blockIdx.x);
    __syncthreads();
    lay_out_list(p, sh, words, blockIdx.x);
    place_slots(p, sh, blockIdx.x);
    order_tokens(p, words, blockIdx.x);
    if (leads) {
      status = judge_ids(p, words);
      if (p.shape.ranks > 1 && threadIdx.x == 0)
        *verdict_of(p, p.call.seat_memory[p.call.seat]) = {status, p.digest};
    }
    cluster_sync();  // the blocks have read each other's memory, and CTA 0 may use all of the lists
  }
  if (p.shape.ranks > 1) copy_tokens(p, sorts);
  if (leads) make_tables(p, sh, words, status);
}
