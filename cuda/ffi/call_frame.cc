#include "call_frame.h"

#include <map>
#include <mutex>

namespace mok::ffi {
namespace {

const char* wait_name(Wait what) {
  switch (what) {
    case Wait::previous_call: return "finish its previous call";
    case Wait::routes: return "arrive with its routes";
    case Wait::rows: return "deliver its rows";
    case Wait::introduction: return "share the memory of the group";
    default: return "finish the call";
  }
}

std::string message(const Status& s, const Shape& shape, double timeout_s) {
  auto num = [](int64_t v) { return std::to_string(v); };
  // a later call may raise it, of a group that has fewer ranks
  const std::string who = "EP rank " + num(s.rank) + (s.rank < shape.ranks ? " of " + num(shape.ranks) : "");
  switch (s.code) {
    case Code::id_out_of_range: {
      const BadId bad = bad_id_of(s);
      return "jax_mok RoutingError: expert id " + num(bad.id) + " in slot " + num(bad.k) + " of token " + num(bad.token) +
             " on " + who + " is neither -1 (no expert) nor in [0, " + num(bad.experts) +
             "). Check the router that produced expert_ids.";
    }
    case Code::over_capacity:
      return "jax_mok CapacityError: " + num(s.value) + " rows are routed to " + who + ", which may hold " +
             num(s.extra) + ". Raise MoEConfig.capacity_factor, or set it to None for room for the worst case.";
    case Code::shape_mismatch:
      return "jax_mok ShapeMismatchError: " + who + " made this call with another shape than its peers, or in another "
             "process than before. All ranks of an EP group must run the same program on the same mesh.";
    case Code::peer_failed:
      return "jax_mok PeerFailedError: " + who + " ended this call by an error of its own.";
    case Code::out_of_memory:
      return "jax_mok: " + who + " is out of host memory for the buffers of an MoE call; lower MoEConfig.capacity_factor or "
             "the batch";
    case Code::peer_died:
      return "jax_mok PeerDiedError: " + who + " is gone: its process ended or left the job. The group cannot be used "
             "any more; see what that process printed last, and start the job again from a checkpoint.";
    default:
      return "jax_mok PeerTimeoutError: " + who + " did not " + wait_name(Wait(s.value)) + " within " +
             std::to_string(s.extra > 0 ? double(s.extra) / 1e9 : timeout_s) + " s. It died, runs another program, or is slower than MoEConfig.timeout_s "
             "(for the first call of a program across processes: MoEConfig.first_call_timeout_s) allows.";
  }
}

uint64_t mix(uint64_t h, std::string_view text) {  // FNV-1a
  for (unsigned char c : text) h = (h ^ c) * 1099511628211ull;
  return (h ^ 0xff) * 1099511628211ull;
}

struct Sites {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> seen;  // how many with the same attributes
};
Sites& sites() {
  static Sites* const s = new Sites;
  return *s;
}

xf::ErrorCode error_code(Code code) {
  switch (code) {
    case Code::id_out_of_range: return xf::ErrorCode::kInvalidArgument;
    case Code::over_capacity:
    case Code::out_of_memory: return xf::ErrorCode::kResourceExhausted;
    case Code::shape_mismatch: return xf::ErrorCode::kFailedPrecondition;
    case Code::peer_failed:
    case Code::peer_died: return xf::ErrorCode::kAborted;
    default: return xf::ErrorCode::kDeadlineExceeded;
  }
}

}  // namespace

uint64_t site_number(std::string_view kind, const xf::Dictionary& attributes) {
  uint64_t h = mix(1469598103934665603ull, kind);
  for (const char* name : {"hidden", "inter", "top_k", "ranks", "experts", "max_rows"})
    h = mix(h, std::to_string(attribute<int64_t>(attributes, name)));
  for (const char* name : {"residuals", "axis", "mesh", "span"})
    h = mix(h, attribute<std::string_view>(attributes, name));
  Sites& s = sites();
  std::lock_guard<std::mutex> lock(s.mutex);
  return mix(h, std::to_string(++s.seen[h]));
}

void forget_site_numbers() {
  Sites& s = sites();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.seen.clear();
}

xf::Error to_error(const Status& status, const Shape& shape, double timeout_s) {
  return xf::Error(error_code(status.code), message(status, shape, timeout_s));
}

}  // namespace mok::ffi
