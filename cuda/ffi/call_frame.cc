#include "call_frame.h"

namespace mok::ffi {
namespace {

std::string message(const Status& s, const Shape& shape, double timeout_s) {
  auto num = [](int64_t v) { return std::to_string(v); };
  const std::string who = "EP rank " + num(s.rank) + " of " + num(shape.ranks);
  switch (s.code) {
    case Code::id_out_of_range:
      return "jax_mok RoutingError: expert id " + num(s.extra) + " in slot " + num(s.value % shape.top_k) + " of token " +
             num(s.value / shape.top_k) + " on " + who + " is neither -1 (no expert) nor in [0, " + num(shape.experts) +
             "). Check the router that produced expert_ids.";
    case Code::over_capacity:
      return "jax_mok CapacityError: " + num(s.value) + " rows are routed to " + who + ", which may hold " +
             num(s.extra) + ". Raise MoEConfig.capacity_factor, or set it to None for room for the worst case.";
    case Code::shape_mismatch:
      return "jax_mok ShapeMismatchError: " + who + " made this call with another shape than its peers. All ranks of an "
             "EP group must run the same program.";
    case Code::peer_failed:
      return "jax_mok PeerFailedError: " + who + " ended this call by an error of its own.";
    default: {
      static const char* const kWaits[] = {"finish its previous call", "arrive with its routes", "deliver its rows",
                                           "finish the call"};
      return "jax_mok PeerTimeoutError: " + who + " did not " + kWaits[s.value & 3] + " within " +
             std::to_string(timeout_s) + " s. It died, runs another program, or is slower than "
             "MoEConfig.timeout_s allows.";
    }
  }
}

xf::ErrorCode error_code(Code code) {
  switch (code) {
    case Code::id_out_of_range: return xf::ErrorCode::kInvalidArgument;
    case Code::over_capacity: return xf::ErrorCode::kResourceExhausted;
    case Code::shape_mismatch: return xf::ErrorCode::kFailedPrecondition;
    case Code::peer_failed: return xf::ErrorCode::kAborted;
    default: return xf::ErrorCode::kDeadlineExceeded;
  }
}

}  // namespace

xf::Error to_error(const Status& status, const Shape& shape, double timeout_s) {
  return xf::Error(error_code(status.code), message(status, shape, timeout_s));
}

}  // namespace mok::ffi
