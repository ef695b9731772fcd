// Routing prologue: one CTA turns the ids of this rank's tokens into the tables of the main kernel.
//
//   ids -> counts per (warp, expert) -> segment starts -> row of every slot, source of every row -> pairs -> tasks
//
// The order of rows is that of core/routing.h: by expert, then by slot. Integers only, so any schedule of threads gives
// the same tables.
#include "params.h"
#include "ptx/sync.h"

// Compile-time shape: MOK_HIDDEN, MOK_INTER, MOK_TOP_K, MOK_EXPERTS (of this rank).
namespace mok {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kExperts = MOK_EXPERTS, kTopK = MOK_TOP_K;
constexpr int32_t kNone = 0x7fffffff;
constexpr int kBlockM = 128, kGroup = 8;  // a group of pairs keeps its weight tiles in L2
constexpr int kGateUpTiles = (MOK_INTER + 127) / 128, kDownTiles = (MOK_HIDDEN + 255) / 256;

struct RouteShared {
  int32_t count[kWarps][kExperts];  // then: where the warp's first slot of the expert goes
  int32_t rows[kExperts], start[kExperts + 1], first_pair[kExperts + 1], first_group[kExperts + 1];
  int32_t bad;  // first slot whose id is out of range
};

// Slots of this warp, 32 at a time and in order; each lane learns how many earlier lanes have its expert.
template <class Visit>
__device__ void for_each_slot(const RouteParams& p, int warp, int lane, Visit visit) {
  const int64_t slots = p.tokens * kTopK, share = (slots + kWarps - 1) / kWarps;
  const int64_t end = min_of(slots, (warp + 1) * share);
  for (int64_t base = warp * share; base < end; base += 32) {
    const int64_t slot = base + lane;
    const int32_t id = slot < end ? p.ids[slot] : -1;
    const uint32_t same = __match_any_sync(~0u, id);
    visit(slot, slot < end, id, __popc(same & ((1u << lane) - 1)), __popc(same));
    __syncwarp();
  }
}

__device__ void count(const RouteParams& p, RouteShared& sh, int warp, int lane) {
  for (int e = lane; e < kExperts; e += 32) sh.count[warp][e] = 0;
  __syncwarp();
  for_each_slot(p, warp, lane, [&](int64_t slot, bool real, int32_t id, int before, int same) {
    if (!real) return;
    if (id >= 0 && id < kExperts) {
      if (before == 0) sh.count[warp][id] += same;
    } else if (id != -1) {
      atomicMin(&sh.bad, int32_t(slot));
    }
  });
}

// Totals of experts, and in place of each warp's count where its slots start in the segment.
__device__ void lay_out(RouteShared& sh, int thread) {
  for (int e = thread; e < kExperts; e += kThreads) {
    int32_t rows = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t n = sh.count[w][e];
      sh.count[w][e] = rows;
      rows += n;
    }
    sh.rows[e] = rows;
  }
  __syncthreads();
  if (thread == 0) {
    int32_t row = 0, pair = 0, group = 0;
    for (int e = 0; e < kExperts; ++e) {
      const int32_t blocks = (sh.rows[e] + kBlockM - 1) / kBlockM, pairs = (blocks + 1) / 2;
      sh.start[e] = row;
      sh.first_pair[e] = pair;
      sh.first_group[e] = group;
      row += blocks * kBlockM;
      pair += pairs;
      group += (pairs + kGroup - 1) / kGroup;
    }
    sh.start[kExperts] = row;
    sh.first_pair[kExperts] = pair;
    sh.first_group[kExperts] = group;
  }
}

__device__ void place_slots(const RouteParams& p, RouteShared& sh, int warp, int lane) {
  for_each_slot(p, warp, lane, [&](int64_t slot, bool real, int32_t id, int before, int same) {
    if (!real) return;
    int32_t row = -1;
    if (id >= 0 && id < kExperts) {
      const int32_t at = sh.count[warp][id];
      row = sh.start[id] + at + before;
      p.routes.row_source[row] = int32_t(slot / kTopK);
    }
    p.routes.slot_row[slot] = row;
    __syncwarp(__activemask());
    if (row >= 0 && before == 0) sh.count[warp][id] += same;
  });
}

__device__ int32_t expert_of(const int32_t* first, int32_t value) {  // last e with first[e] <= value and a member
  int32_t lo = 0, hi = kExperts;
  while (hi - lo > 1) {
    const int32_t mid = (lo + hi) / 2;
    (first[mid] <= value ? lo : hi) = mid;
  }
  return lo;
}

__device__ void describe_rows(const RouteParams& p, const RouteShared& sh, int thread) {
  for (int32_t pair = thread; pair < sh.first_pair[kExperts]; pair += kThreads) {
    const int32_t e = expert_of(sh.first_pair, pair);
    const int32_t row = sh.start[e] + (pair - sh.first_pair[e]) * 2 * kBlockM;
    p.routes.pair_expert[pair] = e;
    p.routes.pair_row[pair] = row;
    p.routes.pair_rows[pair] = int32_t(min_of(2 * kBlockM, sh.start[e + 1] - row));
  }
  for (int32_t row = thread; row < sh.start[kExperts]; row += kThreads) {
    const int32_t e = expert_of(sh.start, row);
    p.routes.row_pair[row] = sh.first_pair[e] + (row - sh.start[e]) / (2 * kBlockM);
    if (row - sh.start[e] >= sh.rows[e]) p.routes.row_source[row] = -1;
  }
}

// Tasks by group of pairs: gate_up of a group, then down of the group before. Column tiles outer, pairs inner, so that
// a weight tile serves the whole group while it is in L2.
__device__ void deal_tasks(const RouteParams& p, const RouteShared& sh, int thread) {
  const int32_t groups = sh.first_group[kExperts], pairs = sh.first_pair[kExperts];
  auto first_pair_of = [&](int32_t g) {
    if (g >= groups) return pairs;
    if (g < 0) return 0;
    const int32_t e = expert_of(sh.first_group, g);
    return sh.first_pair[e] + (g - sh.first_group[e]) * kGroup;
  };
  for (int32_t g = thread; g < groups; g += kThreads) {
    const int32_t first = first_pair_of(g), n = first_pair_of(g + 1) - first, e = expert_of(sh.first_group, g);
    PairTask* gate_up = p.routes.tasks + int64_t(first) * kGateUpTiles + int64_t(first_pair_of(g - 1)) * kDownTiles;
    for (int32_t tile = 0; tile < kGateUpTiles; ++tile)
      for (int32_t m = 0; m < n; ++m) *gate_up++ = PairTask{0, e, first + m, tile};
    PairTask* down = p.routes.tasks + int64_t(first_pair_of(g + 2)) * kGateUpTiles + int64_t(first) * kDownTiles;
    for (int32_t tile = 0; tile < kDownTiles; ++tile)
      for (int32_t m = 0; m < n; ++m) *down++ = PairTask{1, e, first + m, tile};
  }
}

}  // namespace mok

extern "C" __global__ void __launch_bounds__(1024, 1) mok_route(const __grid_constant__ mok::RouteParams p) {
  using namespace mok;
  extern __shared__ __align__(16) char memory[];
  RouteShared& sh = *reinterpret_cast<RouteShared*>(memory);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  if (thread == 0) sh.bad = kNone;
  for (int64_t i = thread; i < Counter::arrays + 3 * p.max_pairs; i += kThreads) p.routes.counters[i] = 0;
  __syncthreads();
  count(p, sh, warp, lane);
  __syncthreads();
  lay_out(sh, thread);
  __syncthreads();
  int32_t rows = 0;
  for (int e = 0; e < kExperts; ++e) rows += sh.rows[e];
  const bool bad = sh.bad != kNone, over = rows > p.max_rows;
  for (int e = thread; e < kExperts; e += kThreads) p.tokens_per_expert[e] = sh.rows[e];
  if (thread == 0) {
    const Code code = bad ? Code::id_out_of_range : over ? Code::over_capacity : Code::ok;
    p.rows_per_rank[0] = rows;
    *p.status = int32_t(code);
    p.routes.totals[0] = code == Code::ok ? sh.first_pair[kExperts] * (kGateUpTiles + kDownTiles) : 0;
    p.routes.totals[1] = code == Code::ok ? sh.start[kExperts] : 0;
    if (code != Code::ok) {
      p.routes.counters[Counter::failed] = 1;
      ptx::store_system(&p.host_status->value, bad ? sh.bad : rows);
      ptx::store_system(&p.host_status->extra, bad ? p.ids[sh.bad] : p.max_rows);
      ptx::store_release_sys(&p.host_status->code, uint64_t(code));
    }
  }
  if (bad || over) return;
  place_slots(p, sh, warp, lane);
  describe_rows(p, sh, thread);
  deal_tasks(p, sh, thread);
}
