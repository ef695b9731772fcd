// Routing: where every (token, k) slot goes, at a cost that grows with the local tokens only.
//
// A rank sorts its own slots by expert and publishes the sorted list and the counts. The owner of expert e lays the
// expert's segment out as [slots of rank 0 | rank 1 | ...], each in (token, k) order, which is global (token, k)
// order for any P. Both directions follow from the P x E counts alone.
#pragma once

#include "types.h"

namespace mok {

// counts[e] = slots with id e. Returns the first slot whose id is neither -1 nor in [0, experts), or -1.
MOK_HD int64_t count_slots(const int32_t* ids, int64_t slots, int32_t experts, int32_t* counts) {
  int64_t bad = -1;
  for (int32_t e = 0; e < experts; ++e) counts[e] = 0;
  for (int64_t i = 0; i < slots; ++i) {
    const int32_t e = ids[i];
    if (e >= 0 && e < experts) ++counts[e];
    else if (e != -1 && bad < 0) bad = i;
  }
  return bad;
}

// sorted = slot numbers by expert, stable. cursor[e] is scratch. Ids outside [0, experts) are left out.
MOK_HD void sort_slots(const int32_t* ids, int64_t slots, int32_t experts, const int32_t* counts, int32_t* cursor,
                       int32_t* sorted) {
  int32_t at = 0;
  for (int32_t e = 0; e < experts; ++e) { cursor[e] = at; at += counts[e]; }
  for (int64_t i = 0; i < slots; ++i) {
    const int32_t e = ids[i];
    if (e >= 0 && e < experts) sorted[cursor[e]++] = int32_t(i);
  }
}

// Tables over all experts, derived from the counts [P, E]. `me` is the rank that holds them.
struct Routes {
  int64_t* rows;       // [E] rows of the expert's segment
  int64_t* start;      // [E] first row of the segment in its owner's routed buffer
  int64_t* before;     // [E] rows of ranks < me in the segment: where my own range starts
  int64_t* list;       // [E] where expert e starts in my own sorted list
  int64_t* rank_rows;  // [P] routed rows of each rank, padding not counted
  int64_t* rank_end;   // [P] end of the last segment, padding counted
};

MOK_HD void build_routes(const int32_t* counts, const Shape& s, int32_t block_m, int32_t me, Routes r) {
  const int32_t local = s.local_experts();
  int64_t list = 0;
  for (int32_t owner = 0; owner < s.ranks; ++owner) {
    int64_t total = 0, at = 0;
    for (int32_t e = owner * local; e < (owner + 1) * local; ++e) {
      int64_t rows = 0;
      for (int32_t src = 0; src < s.ranks; ++src) {
        if (src == me) r.before[e] = rows;
        rows += counts[int64_t{src} * s.experts + e];
      }
      r.rows[e] = rows;
      r.start[e] = at;
      r.list[e] = list;
      list += counts[int64_t{me} * s.experts + e];
      total += rows;
      at += align_up(rows, block_m);
    }
    r.rank_rows[owner] = total;
    r.rank_end[owner] = at;
  }
}

// First rank that receives more rows than it may hold, or -1.
MOK_HD int32_t over_capacity(const Routes& r, const Shape& s) {
  for (int32_t p = 0; p < s.ranks; ++p)
    if (r.rank_rows[p] > s.max_rows) return p;
  return -1;
}

// A run of rows of one segment that come from one source rank, and where they stand in that rank's sorted list.
struct SourceRun {
  int32_t source;
  int64_t row;       // in the segment
  int64_t rows;
  int64_t position;  // in the source's sorted slot list
};

// Calls visit(SourceRun) for the rows [first, last) of expert e, in row order. list_start(src) = where expert e
// starts in src's sorted list.
template <class ListStart, class Visit>
MOK_HD void for_each_source(const int32_t* counts, const Shape& s, int32_t e, int64_t first, int64_t last,
                            ListStart list_start, Visit visit) {
  int64_t at = 0;
  for (int32_t src = 0; src < s.ranks && at < last; ++src) {
    const int64_t n = counts[int64_t{src} * s.experts + e];
    const int64_t lo = at > first ? at : first, hi = min_of(at + n, last);
    if (lo < hi) visit(SourceRun{src, lo, hi - lo, list_start(src) + (lo - at)});
    at += n;
  }
}

}  // namespace mok
