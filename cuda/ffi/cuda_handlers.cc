// XLA FFI handlers for the platform "CUDA". Execute only encodes tensor maps and launches: everything else happened
// when XLA instantiated the call.
#include "cuda_handlers.h"

#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "call_frame.h"
#include "cuda_backward.h"

namespace mok::ffi {
namespace {

// What the process knows of its GPUs; never destroyed: calls may still run at exit.
struct Process {
  CudaLoader load;
  std::function<std::vector<int>()> devices;
  std::mutex mutex;
  CudaSeats* seats = nullptr;
};

Process& process() {
  static Process* const p = new Process;
  return *p;
}

// The seats of this process, one for each of its GPUs, in their order.
CudaSeats& seats_of_process(const CudaDriver& driver) {
  Process& p = process();
  const std::vector<int> devices = p.devices();  // takes Python's lock, which must not be waited for under ours
  std::lock_guard<std::mutex> lock(p.mutex);
  if (p.seats == nullptr) p.seats = new CudaSeats(driver, devices);
  return *p.seats;
}

// One per call site of a compiled program, shared by all devices that run it.
struct CudaCall {
  static xf::TypeId id;
  const CudaDriver& driver;
  CudaSeats& seats;
  CudaKernels kernels;
};
xf::TypeId CudaCall::id = {};

Shape arena_shape(const xf::Dictionary& attributes) {
  auto number = [&](std::string_view name) { return attribute<int64_t>(attributes, name); };
  return {int32_t(number("ranks")), int32_t(number("experts")), int32_t(number("top_k")), 2, number("tokens"),
          number("hidden"), number("inter"), number("shared_inter"), number("max_rows")};
}

xf::ErrorOr<std::unique_ptr<CudaCall>> prepare(const xf::Dictionary& attributes, const char* main) {
  try {
    const CudaDriver* driver = CudaDriver::get();
    if (driver == nullptr) throw std::runtime_error("libcuda.so.1 cannot be loaded");
    const Shape s = arena_shape(attributes);
    CudaSeats& seats = seats_of_process(*driver);
    if (s.ranks > 1) seats.reserve(cuda_arena_layout(s), max_blocks(s, kCudaTiles));
    const bool save = attribute<int64_t>(attributes, "save") != 0;
    return std::make_unique<CudaCall>(
        CudaCall{*driver, seats, process().load(main, s.hidden, s.inter, s.top_k, s.shared_inter, save)});
  } catch (const std::exception& e) {
    return xf::Unexpected(xf::Error(xf::ErrorCode::kInternal, std::string("jax_mok: preparing a CUDA call failed: ") + e.what()));
  }
}

xf::ErrorOr<std::unique_ptr<CudaCall>> prepare_forward(xf::Dictionary attributes) { return prepare(attributes, "mok_forward"); }
xf::ErrorOr<std::unique_ptr<CudaCall>> prepare_backward(xf::Dictionary attributes) { return prepare(attributes, "mok_backward"); }

// Where and when a call runs, or the error that an earlier one left behind.
struct Entry {
  int32_t seat;
  CallOrder::Place place;
};

xf::Error enter(CudaCall* site, xf::RunId run, int32_t device, const CudaInputs& c, Entry* entry) {
  entry->seat = site->seats.seat_of(device);
  if (entry->seat < 0)
    return xf::Error(xf::ErrorCode::kInternal, "jax_mok: GPU " + std::to_string(device) + " was not there when the first call was made");
  if (c.shape.ranks > 1) entry->place = site->seats.order().enter(entry->seat, run.run_id, site);
  else entry->place = {0, 0, site->seats.order().take_failure(entry->seat)};
  const Status& raise = entry->place.raise;
  return raise.ok() ? xf::Error::Success() : to_error(raise, c.shape, c.timeout_s);
}

CudaInputs inputs_of(const xf::RemainingArgs& in, const xf::Dictionary& attributes) {
  return {shape_of(in, attributes),
          attribute<double>(attributes, "timeout_s"),
          static_cast<const int32_t*>(data(in, kCoords)),
          data(in, kX),
          static_cast<const int32_t*>(data(in, kIds)),
          static_cast<const float*>(data(in, kWeights)),
          data(in, kGate), data(in, kUp), data(in, kDown),
          data(in, kSharedGate), data(in, kSharedUp), data(in, kSharedDown)};
}

xf::Error launched(int failed) {
  if (failed == 0) return xf::Error::Success();
  return xf::Error(xf::ErrorCode::kInternal, "jax_mok: the CUDA driver refused a launch with error " + std::to_string(failed));
}

xf::Error forward(void* stream, xf::RunId run, int32_t device, CudaCall* site, xf::RemainingArgs in,
                  xf::RemainingRets out, xf::Dictionary attributes) try {
  if (xf::Error e = check_counts(in, kForwardOperands, out, kForwardResults); e.failure()) return e;
  CudaForward call{inputs_of(in, attributes),
                   data(out, 0),
                   {},
                   static_cast<int32_t*>(data(out, 1)),
                   static_cast<int32_t*>(data(out, 2)),
                   static_cast<int32_t*>(data(out, 3)),
                   data(out, kWorkspace)};
  if (attribute<int64_t>(attributes, "save") != 0)
    for (size_t i = 0; i < kSavedBuffers; ++i) call.saved[i] = data(out, 4 + i);
  Entry entry;
  if (xf::Error e = enter(site, run, device, call, &entry); e.failure()) return e;
  return launched(launch_forward(site->driver, site->kernels, site->seats, entry.seat, entry.place, call, stream,
                                 site->seats.multiprocessors(entry.seat)));
} catch (const std::exception& e) {
  return xf::Error(xf::ErrorCode::kInternal, std::string("jax_mok: ") + e.what());
}

xf::Error backward(void* stream, xf::RunId run, int32_t device, CudaCall* site, xf::RemainingArgs in,
                   xf::RemainingRets out, xf::Dictionary attributes) try {
  if (xf::Error e = check_counts(in, kBackwardOperands, out, kBackwardResults); e.failure()) return e;
  CudaBackward call{inputs_of(in, attributes),
                    {},
                    data(in, kBackwardOperands - 1),
                    data(out, 0), data(out, 1),
                    data(out, 2), data(out, 3), data(out, 4), data(out, 5), data(out, 6), data(out, 7),
                    data(out, kBackwardResults - 1)};
  if (attribute<int64_t>(attributes, "save") != 0)
    for (size_t i = 0; i < kSavedBuffers; ++i) call.saved[i] = data(in, kForwardOperands + i);
  Entry entry;
  if (xf::Error e = enter(site, run, device, call, &entry); e.failure()) return e;
  return launched(launch_backward(site->driver, site->kernels, site->seats, entry.seat, entry.place, call, stream,
                                  site->seats.multiprocessors(entry.seat)));
} catch (const std::exception& e) {
  return xf::Error(xf::ErrorCode::kInternal, std::string("jax_mok: ") + e.what());
}

}  // namespace

#define MOK_CUDA_EXECUTE(handler, function)                                                                      \
  XLA_FFI_DEFINE_HANDLER(handler, function,                                                                      \
                         xf::Ffi::Bind().Ctx<xf::PlatformStream<void*>>().Ctx<xf::RunId>().Ctx<xf::DeviceOrdinal>() \
                             .Ctx<xf::State<CudaCall>>().RemainingArgs().RemainingRets().Attrs())

XLA_FFI_DEFINE_HANDLER(kPrepareForward, prepare_forward, xf::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kPrepareBackward, prepare_backward, xf::Ffi::BindInstantiate().Attrs());
MOK_CUDA_EXECUTE(kCudaForward, forward);
MOK_CUDA_EXECUTE(kCudaBackward, backward);

namespace {

template <const auto& kHandler>
XLA_FFI_Error* with_registered_type(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const error = register_type_once<CudaCall>(frame->api, "jax_mok_cuda_call");
  return error != nullptr ? error : kHandler(frame);
}

}  // namespace

void set_cuda_loader(CudaLoader loader, std::function<std::vector<int>()> devices) {
  process().load = std::move(loader);
  process().devices = std::move(devices);
}

int64_t cuda_held_bytes() {
  Process& p = process();
  std::lock_guard<std::mutex> lock(p.mutex);
  return p.seats == nullptr ? 0 : p.seats->bytes();
}

std::vector<Handler> cuda_handlers() {
  return {{"jax_mok_forward", reinterpret_cast<void*>(&with_registered_type<kPrepareForward>),
           reinterpret_cast<void*>(&with_registered_type<kCudaForward>)},
          {"jax_mok_backward", reinterpret_cast<void*>(&with_registered_type<kPrepareBackward>),
           reinterpret_cast<void*>(&with_registered_type<kCudaBackward>)}};
}

}  // namespace mok::ffi
