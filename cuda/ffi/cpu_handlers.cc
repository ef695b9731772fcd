// XLA FFI handlers for the platform "cpu". A handler copies what it needs out of the call frame, hands the call to a
// thread of its own and returns a future: XLA's threads never block on a peer, so they cannot starve one.
#include "cpu_handlers.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../cpu/layer.h"
#include "../cpu/registry.h"
#include "../cpu/threads.h"
#include "call_frame.h"
#include "call_order.h"

namespace mok::ffi {
namespace {

// An EP group that is only a part of its program's devices cannot raise: the others would wait for it in XLA's collectives
// until XLA ends the process. Its failed calls return NaN, and all devices of the next call raise, as on GPUs.
struct Deferred {
  static constexpr int32_t kMostDevices = 1024;
  std::vector<HostStatus> statuses = std::vector<HostStatus>(kMostDevices);
  CallOrder order{statuses.data(), kMostDevices};
  std::mutex mutex;
  std::map<int32_t, int32_t> seats;

  // Devices of a job are numbered over all its processes, with gaps.
  int32_t seat_of(int32_t device) {
    std::lock_guard<std::mutex> lock(mutex);
    const int32_t seat = seats.emplace(device, int32_t(seats.size())).first->second;
    if (seat >= kMostDevices) throw std::runtime_error("a process has more than 1024 CPU devices");
    return seat;
  }
};
Deferred& deferred() {
  static Deferred* const d = new Deferred;
  return *d;
}

// One per call site of a compiled program, shared by all devices that run it: what tells two calls of a run apart.
class CallSite {
 public:
  static xf::TypeId id;

  explicit CallSite(uint64_t number) : number_(number) {}
  uint64_t number() const { return number_; }
  // Whether the rank has not been here before: its peers may still be compiling the program.
  bool is_first_visit(int32_t rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    return visitors_.insert(rank).second;
  }

 private:
  const uint64_t number_;
  std::mutex mutex_;
  std::set<int32_t> visitors_;
};
xf::TypeId CallSite::id = {};

xf::ErrorOr<std::unique_ptr<CallSite>> instantiate_forward(xf::Dictionary attributes) {
  return std::make_unique<CallSite>(site_number("forward", attributes));
}
xf::ErrorOr<std::unique_ptr<CallSite>> instantiate_backward(xf::Dictionary attributes) {
  return std::make_unique<CallSite>(site_number("backward", attributes));
}

// The residuals from position `first` on; none of them unless they were saved.
template <class Buffers>
cpu::SavedBuffers saved_buffers(const Buffers& buffers, size_t first, bool save) {
  if (!save) return {};
  return {data(buffers, first), data(buffers, first + 1), data(buffers, first + 2), data(buffers, first + 3),
          data(buffers, first + 4)};
}

struct Decoded {
  cpu::CallArgs args;
  cpu::GroupName group;
  cpu::CallKey key;
  double patience_s;  // for the calls before this one, whose peers may still be compiling
  int32_t device;
  bool spans_processes, alone;
  bool defers;        // what goes wrong

  double limit_s(const Status& s) const { return is_arrival(Wait(s.value)) ? args.arrival_timeout_s : args.timeout_s; }
};

Decoded decode(const xf::RemainingArgs& in, const xf::Dictionary& attributes, xf::RunId run, int32_t device,
               CallSite* site) {
  const auto* coords = static_cast<const int32_t*>(data(in, kCoords));
  const Shape shape = shape_of(in, attributes);
  auto text = [&](const char* name) { return std::string(attribute<std::string_view>(attributes, name)); };
  const std::string span = text("span");
  const double timeout_s = attribute<double>(attributes, "timeout_s");
  const double first_s = span.empty() ? timeout_s : attribute<double>(attributes, "first_call_timeout_s");
  const std::string group = text("mesh") + "/" + text("axis") + "/" + std::to_string(coords[1]) + "/" + span;
  return {{shape, coords[0], site->is_first_visit(coords[0]) ? first_s : timeout_s, timeout_s,
           data(in, kX), static_cast<const int32_t*>(data(in, kIds)), static_cast<const float*>(data(in, kWeights)),
           {data(in, kGate), data(in, kUp), data(in, kDown)},
           {data(in, kSharedGate), data(in, kSharedUp), data(in, kSharedDown)}},
          {group, shape.ranks, !span.empty()},
          {run.run_id, site->number()},
          first_s > timeout_s ? first_s : timeout_s,
          device,
          !span.empty(),
          runs_alone(attributes),
          span.empty() && attribute<int64_t>(attributes, "devices") > shape.ranks};
}

// Results that nobody may take for any: floats are NaN, counts 0.
struct Poison {
  struct Array { void* at; size_t bytes; int value; };
  std::vector<Array> arrays;
  int32_t* status = nullptr;

  explicit Poison(const xf::RemainingRets& results) {
    for (size_t i = 0; i < results.size(); ++i) {
      auto array = *results.get<xf::AnyBuffer>(i);
      const bool counts = array->element_type() == xf::DataType::S32;
      arrays.push_back({array->untyped_data(), array->size_bytes(), counts ? 0 : 0xff});
    }
  }
  void apply(Code code) const {
    for (const Array& a : arrays) std::memset(a.at, a.value, a.bytes);
    if (status != nullptr) *status = int32_t(code);
  }
};

int worker_count(const Shape& shape) {
  const int n = cpu::core_count() / shape.ranks;
  return n > 1 ? n : 1;
}

using Body = std::function<Status(cpu::Group&, uint64_t generation)>;

// Finds the rank's group, waits for the rank's turn in it and runs its part.
Status run_in_group(const Decoded& call, const Body& body) {
  const cpu::CallArgs& args = call.args;
  const auto group = cpu::get_group(call.group, args.rank, args.arrival_timeout_s);
  if (group == nullptr) return abort_status(pack_abort(0, Wait::introduction, 0));
  const cpu::Entrance entrance(*group, args.rank, call.key, arena_layout(args.shape, cpu::kTiles), call.patience_s);
  return entrance.abandoned() ? entrance.why() : body(*group, entrance.generation());
}

xf::Future failed(xf::Error error) {
  xf::Promise promise;
  xf::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

// How a rank's part of a call ended; `failure`: in words that no status has.
Status run_guarded(const Decoded& call, const Body& body, std::string* failure) {
  try {
    return run_in_group(call, body);
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, call.args.rank};
  } catch (const std::exception& e) {
    *failure = std::string("jax_mok: ") + e.what();
    return {Code::peer_failed, call.args.rank};
  }
}

// Runs one rank's call on a thread of its own, in the group's order.
xf::Future launch(const Decoded& call, const CallSite* site, Poison poison, Body body) {
  const int32_t seat = deferred().seat_of(call.device);
  CallOrder::Place place{};
  if (!call.spans_processes)
    place = deferred().order.enter(seat, call.key.run, {site, site->number()}, call.alone);
  if (const Status& raise = place.raise; !raise.ok()) return failed(to_error(raise, call.args.shape, call.limit_s(raise)));
  xf::Promise promise;
  xf::Future future(promise);
  auto job = [call, seat, promise, generation = place.generation, poison = std::move(poison), body = std::move(body)]() mutable {
    std::string failure;
    Status status = run_guarded(call, body, &failure);
    if (!status.ok() && call.defers) {
      poison.apply(status.code);
      if (status.code == Code::peer_timeout) status.extra = int64_t(call.limit_s(status) * 1e9);
      deferred().order.leave_behind(seat, generation, status);
      status = {};
    }
    // Completing the promise may run XLA's continuation on this thread: nothing of ours may be held here.
    if (status.ok()) promise.SetAvailable();
    else if (!failure.empty()) promise.SetError(xf::Error(xf::ErrorCode::kResourceExhausted, failure));
    else promise.SetError(to_error(status, call.args.shape, call.limit_s(status)));
  };
  if (!cpu::run_on_thread(job)) job();  // no more threads: XLA's own has to wait
  return future;
}

xf::Future forward(xf::RunId run, int32_t device, CallSite* site, xf::RemainingArgs in, xf::RemainingRets results,
                   xf::Dictionary attributes) {
  if (xf::Error e = check_counts(in, kForwardOperands, results, kForwardResults); e.failure()) return failed(e);
  const Decoded call = decode(in, attributes, run, device, site);
  const cpu::ForwardResults out{data(results, 0), static_cast<int32_t*>(data(results, 1)),
                                static_cast<int32_t*>(data(results, 2)), static_cast<int32_t*>(data(results, 3)),
                                saved_buffers(results, 4, attribute<int64_t>(attributes, "save") != 0)};
  const int workers = worker_count(call.args.shape);
  Poison poison(results);
  poison.status = out.status;
  return launch(call, site, std::move(poison), [args = call.args, out, workers](cpu::Group& group, uint64_t generation) {
    return cpu::run_forward(group, generation, args, out, workers);
  });
}

xf::Future backward(xf::RunId run, int32_t device, CallSite* site, xf::RemainingArgs in, xf::RemainingRets results,
                    xf::Dictionary attributes) {
  if (xf::Error e = check_counts(in, kBackwardOperands, results, kBackwardResults); e.failure()) return failed(e);
  const Decoded call = decode(in, attributes, run, device, site);
  const cpu::SavedBuffers saved = saved_buffers(in, kForwardOperands, attribute<std::string_view>(attributes, "residuals") == "save");
  const void* dy = data(in, kBackwardOperands - 1);
  const cpu::BackwardResults out{data(results, 0), static_cast<float*>(data(results, 1)),
                                 {data(results, 2), data(results, 3), data(results, 4)},
                                 {data(results, 5), data(results, 6), data(results, 7)},
                                 weight_grad_bytes(attributes)};
  const int workers = worker_count(call.args.shape);
  return launch(call, site, Poison(results), [args = call.args, saved, dy, out, workers](cpu::Group& group, uint64_t generation) {
    return cpu::run_backward(group, generation, args, saved, dy, out, workers);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kInstantiateForward, instantiate_forward, xf::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kInstantiateBackward, instantiate_backward, xf::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kForward, forward,
                       xf::Ffi::Bind().Ctx<xf::RunId>().Ctx<xf::DeviceOrdinal>().Ctx<xf::State<CallSite>>()
                           .RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kBackward, backward,
                       xf::Ffi::Bind().Ctx<xf::RunId>().Ctx<xf::DeviceOrdinal>().Ctx<xf::State<CallSite>>()
                           .RemainingArgs().RemainingRets().Attrs());

namespace {

template <const auto& kHandler>
XLA_FFI_Error* with_registered_type(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const error = register_type_once<CallSite>(frame->api, "jax_mok_call_site");
  return error != nullptr ? error : kHandler(frame);
}

}  // namespace

std::vector<Handler> cpu_handlers() {
  auto stage = [](auto* handler) { return reinterpret_cast<void*>(handler); };
  return {{"jax_mok_forward", stage(&with_registered_type<kInstantiateForward>),
           stage(&with_registered_type<kForward>)},
          {"jax_mok_backward", stage(&with_registered_type<kInstantiateBackward>),
           stage(&with_registered_type<kBackward>)}};
}

}  // namespace mok::ffi
