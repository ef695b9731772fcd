// The operands and attributes that the calls of every platform share.
#pragma once

#include <string>
#include <string_view>

#include "../core/status.h"
#include "../core/types.h"
#include "xla/ffi/api/ffi.h"

namespace mok::ffi {

namespace xf = xla::ffi;

// The operands of both calls start alike; then come, in the backward call, the residuals and dY.
enum Operand { kCoords, kX, kIds, kWeights, kGate, kUp, kDown, kSharedGate, kSharedUp, kSharedDown, kForwardOperands };
// Results of the forward call: y, stats (3), residuals; of the backward call: one gradient for each of x, the router's and
// the experts' weights. Then, of both, work space that only GPUs use.
constexpr size_t kSavedBuffers = 5, kWorkspace = 4 + kSavedBuffers, kForwardResults = kWorkspace + 1;
constexpr size_t kBackwardOperands = kForwardOperands + kSavedBuffers + 1, kBackwardResults = 9;

inline xf::Error check_counts(const xf::RemainingArgs& in, size_t operands, const xf::RemainingRets& out,
                              size_t results) {
  if (in.size() == operands && out.size() == results) return xf::Error::Success();
  return xf::Error(xf::ErrorCode::kInternal,
                   "jax_mok: the Python and native parts of the package do not match; reinstall");
}

inline void* data(const xf::RemainingArgs& in, size_t i) { return in.get<xf::AnyBuffer>(i)->untyped_data(); }
inline void* data(const xf::RemainingRets& out, size_t i) { return (*out.get<xf::AnyBuffer>(i))->untyped_data(); }

template <class T>
T attribute(const xf::Dictionary& attributes, std::string_view name) {
  return attributes.get<T>(name).value();
}

// Of an element of the backward call's weight gradients: float32 for master weights under a bfloat16 x.
inline int32_t weight_grad_bytes(const xf::Dictionary& attributes) {
  return attribute<std::string_view>(attributes, "weight_grads") == "float32" ? 4 : 2;
}

inline Shape shape_of(const xf::RemainingArgs& in, const xf::Dictionary& attributes) {
  auto dims = [&](size_t i) { return in.get<xf::AnyBuffer>(i)->dimensions(); };
  const bool half = in.get<xf::AnyBuffer>(kX)->element_type() == xf::DataType::BF16;
  return {int32_t(attribute<int64_t>(attributes, "ranks")), int32_t(attribute<int64_t>(attributes, "experts")),
          int32_t(dims(kIds)[1]), half ? 2 : 4, dims(kX)[0], dims(kX)[1], dims(kGate)[2], dims(kSharedGate)[1],
          attribute<int64_t>(attributes, "max_rows")};
}

// Whether the program runs this call on one device only: its mesh has no other.
inline bool runs_alone(const xf::Dictionary& attributes) { return attribute<int64_t>(attributes, "devices") == 1; }

// XLA reads a handler's state type when the handler is registered, and JAX registers handlers before types. The first
// call that XLA makes to any handler, a query for its metadata, brings the API with which to register the type.
template <class T>
XLA_FFI_Error* register_type_once(const XLA_FFI_Api* api, const char* name) {
  static XLA_FFI_TypeInfo info = xf::MakeTypeInfo<T>();
  static XLA_FFI_Error* const error = xf::Ffi::RegisterTypeId(api, name, &T::id, &info);
  return error;
}

// The same number in every process for the same call site: XLA sets up the sites of a program in one order, and the
// processes of a job compile the same programs in the same order. So a site is the n-th one with its attributes.
uint64_t site_number(std::string_view kind, const xf::Dictionary& attributes);
// Another job counts anew.
void forget_site_numbers();

// How a failed call ends for XLA: a code and a message with a tag that Python turns into a typed error.
xf::Error to_error(const Status& status, const Shape& shape, double timeout_s);

}  // namespace mok::ffi
