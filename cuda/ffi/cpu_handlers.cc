// XLA FFI handlers for the platform "cpu". A handler copies what it needs out of the call frame, hands the call to a
// thread of its own and returns a future: XLA's threads never block on a peer, so they cannot starve one.
#include "cpu_handlers.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>

#include "../cpu/layer.h"
#include "../cpu/threads.h"
#include "call_frame.h"

namespace mok::ffi {
namespace {

// One per call site of a compiled program, shared by all devices that run it: what tells two calls of a run apart.
struct CallSite {
  static xf::TypeId id;
};
xf::TypeId CallSite::id = {};

xf::ErrorOr<std::unique_ptr<CallSite>> instantiate() { return std::make_unique<CallSite>(); }

// The residuals from position `first` on; none of them unless they were saved.
template <class Buffers>
cpu::SavedBuffers saved_buffers(const Buffers& buffers, size_t first, bool save) {
  if (!save) return {};
  return {data(buffers, first), data(buffers, first + 1), data(buffers, first + 2), data(buffers, first + 3),
          data(buffers, first + 4)};
}

struct Decoded {
  cpu::CallArgs args;
  int32_t group;
  std::string mesh;
};

Decoded decode(const xf::RemainingArgs& in, const xf::Dictionary& attributes) {
  const auto* coords = static_cast<const int32_t*>(data(in, kCoords));
  return {{shape_of(in, attributes), coords[0], attribute<double>(attributes, "timeout_s"), data(in, kX),
           static_cast<const int32_t*>(data(in, kIds)), static_cast<const float*>(data(in, kWeights)),
           {data(in, kGate), data(in, kUp), data(in, kDown)},
           {data(in, kSharedGate), data(in, kSharedUp), data(in, kSharedDown)}},
          coords[1],
          std::string(attribute<std::string_view>(attributes, "mesh")) + "/" +
              std::string(attribute<std::string_view>(attributes, "axis"))};
}

int worker_count(const Shape& shape) {
  const int n = cpu::core_count() / shape.ranks;
  return n > 1 ? n : 1;
}

using Body = std::function<Status(cpu::Group&, uint64_t generation)>;

// Runs one rank's call on a thread of its own, in the group's order.
xf::Future launch(const Decoded& call, int64_t run_id, const CallSite* site, Body body) {
  xf::Promise promise;
  xf::Future future(promise);
  auto job = [call, run_id, site, promise, body = std::move(body)]() mutable {
    Status status;
    std::string failure;
    try {
      const std::shared_ptr<cpu::Group> group = cpu::Group::get(call.args.shape.ranks, call.mesh, call.group);
      const cpu::Entrance entrance(*group, call.args.rank, {run_id, site}, arena_layout(call.args.shape, cpu::kTiles));
      status = entrance.abandoned() ? entrance.why() : body(*group, entrance.generation());
    } catch (const std::bad_alloc&) {
      failure = "jax_mok: out of host memory for the buffers of an MoE call; lower MoEConfig.capacity_factor or the batch";
    } catch (const std::exception& e) {
      failure = std::string("jax_mok: ") + e.what();
    }
    // Completing the promise may run XLA's continuation on this thread: nothing of ours may be held here.
    if (!failure.empty()) promise.SetError(xf::Error(xf::ErrorCode::kResourceExhausted, failure));
    else if (!status.ok()) promise.SetError(to_error(status, call.args.shape, call.args.timeout_s));
    else promise.SetAvailable();
  };
  if (!cpu::run_on_thread(job)) job();  // no more threads: XLA's own has to wait
  return future;
}

xf::Future failed(xf::Error error) {
  xf::Promise promise;
  xf::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

xf::Future forward(xf::RunId run, CallSite* site, xf::RemainingArgs in, xf::RemainingRets results,
                   xf::Dictionary attributes) {
  if (xf::Error e = check_counts(in, kForwardOperands, results, kForwardResults); e.failure()) return failed(e);
  const Decoded call = decode(in, attributes);
  const cpu::ForwardResults out{data(results, 0), static_cast<int32_t*>(data(results, 1)),
                                static_cast<int32_t*>(data(results, 2)), static_cast<int32_t*>(data(results, 3)),
                                saved_buffers(results, 4, attribute<int64_t>(attributes, "save") != 0)};
  const int workers = worker_count(call.args.shape);
  return launch(call, run.run_id, site, [args = call.args, out, workers](cpu::Group& group, uint64_t generation) {
    return cpu::run_forward(group, generation, args, out, workers);
  });
}

xf::Future backward(xf::RunId run, CallSite* site, xf::RemainingArgs in, xf::RemainingRets results,
                    xf::Dictionary attributes) {
  if (xf::Error e = check_counts(in, kBackwardOperands, results, kBackwardResults); e.failure()) return failed(e);
  const Decoded call = decode(in, attributes);
  const cpu::SavedBuffers saved = saved_buffers(in, kForwardOperands, attribute<std::string_view>(attributes, "residuals") == "save");
  const void* dy = data(in, kBackwardOperands - 1);
  const cpu::BackwardResults out{data(results, 0), static_cast<float*>(data(results, 1)),
                                 {data(results, 2), data(results, 3), data(results, 4)},
                                 {data(results, 5), data(results, 6), data(results, 7)}};
  const int workers = worker_count(call.args.shape);
  return launch(call, run.run_id, site, [args = call.args, saved, dy, out, workers](cpu::Group& group, uint64_t generation) {
    return cpu::run_backward(group, generation, args, saved, dy, out, workers);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kInstantiate, instantiate, xf::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER(kForward, forward,
                       xf::Ffi::Bind().Ctx<xf::RunId>().Ctx<xf::State<CallSite>>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kBackward, backward,
                       xf::Ffi::Bind().Ctx<xf::RunId>().Ctx<xf::State<CallSite>>().RemainingArgs().RemainingRets().Attrs());

namespace {

template <const auto& kHandler>
XLA_FFI_Error* with_registered_type(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const error = register_type_once<CallSite>(frame->api, "jax_mok_call_site");
  return error != nullptr ? error : kHandler(frame);
}

}  // namespace

std::vector<Handler> cpu_handlers() {
  void* const instantiate = reinterpret_cast<void*>(&with_registered_type<kInstantiate>);
  return {{"jax_mok_forward", instantiate, reinterpret_cast<void*>(&with_registered_type<kForward>)},
          {"jax_mok_backward", instantiate, reinterpret_cast<void*>(&with_registered_type<kBackward>)}};
}

}  // namespace mok::ffi
