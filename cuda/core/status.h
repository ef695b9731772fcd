// How a call can fail at run time. One 64-bit word says it all, so a rank can tell its peers with one store.
#pragma once

#include "types.h"

namespace mok {

enum class Code : int32_t {
  ok = 0,
  id_out_of_range = 1,  // rank, value and extra as in bad_id()
  over_capacity = 2,    // rank, value = rows routed to it
  peer_timeout = 3,     // rank = the one that did not answer, value = the wait that expired, extra = its ns, if known
  shape_mismatch = 4,   // rank = one whose call has another shape
  peer_failed = 5,      // rank = one that ended its call by an error of its own
  peer_died = 6,        // rank = one whose process ended
  out_of_memory = 7,    // rank = one whose process has no room for the buffers of its call
};

// What a rank waited for when it gave up, or what it learned instead.
enum class Wait : int32_t {
  previous_call = 0,
  routes = 1,
  rows = 2,
  finish = 3,
  failure = 4,
  death = 5,
  agreement = 6,  // on the shape of the call and on who runs which rank
  introduction = 7,  // to the group's shared memory
};

// Whether the wait is one for peers to arrive at a call, not one for them to work on it.
MOK_HD bool is_arrival(Wait what) {
  return what == Wait::previous_call || what == Wait::routes || what == Wait::introduction;
}

struct Status {
  Code code = Code::ok;
  int32_t rank = -1;   // EP rank at fault
  int64_t value = 0;
  int64_t extra = 0;

  MOK_HD bool ok() const { return code == Code::ok; }
};

// A slot whose id is no expert. On GPUs a later call raises it, maybe one of another shape, so the status says it all.
struct BadId {
  int64_t token, k, experts;
  int32_t id;
};
MOK_HD Status bad_id(int32_t rank, const BadId& b) {
  return {Code::id_out_of_range, rank, b.token << 20 | b.k, b.experts << 32 | int64_t{uint32_t(b.id)}};
}
MOK_HD BadId bad_id_of(const Status& s) { return {s.value >> 20, s.value & 0xfffff, s.extra >> 32, int32_t(s.extra)}; }

}  // namespace mok
