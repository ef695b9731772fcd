// XLA FFI handlers for the platform "CUDA". Execute only encodes tensor maps and launches: everything else happened
// when XLA instantiated the call.
#include "cuda_handlers.h"

#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "call_frame.h"

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
  std::lock_guard<std::mutex> lock(p.mutex);
  if (p.seats == nullptr) p.seats = new CudaSeats(driver, p.devices());
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

xf::ErrorOr<std::unique_ptr<CudaCall>> instantiate(xf::Dictionary attributes) {
  try {
    const CudaDriver* driver = CudaDriver::get();
    if (driver == nullptr) throw std::runtime_error("libcuda.so.1 cannot be loaded");
    const Shape s = arena_shape(attributes);
    CudaSeats& seats = seats_of_process(*driver);
    if (s.ranks > 1) seats.reserve(cuda_arena_layout(s), max_blocks(s, kCudaTiles));
    return std::make_unique<CudaCall>(CudaCall{*driver, seats, process().load(s.hidden, s.inter, s.top_k, s.shared_inter)});
  } catch (const std::exception& e) {
    return xf::Unexpected(xf::Error(xf::ErrorCode::kInternal, std::string("jax_mok: preparing a CUDA call failed: ") + e.what()));
  }
}

// The error that an earlier call of this GPU left behind, if any. A kernel cannot raise; the next call on the host does.
Status take_failure(HostStatus* status) {
  const uint64_t code = __atomic_exchange_n(&status->code, 0, __ATOMIC_ACQUIRE);
  return {Code(code), int32_t(status->rank), status->value, status->extra};
}

xf::Error forward(void* stream, xf::RunId run, int32_t device, CudaCall* site, xf::RemainingArgs in,
                  xf::RemainingRets out, xf::Dictionary attributes) {
  if (xf::Error e = check_counts(in, kForwardOperands, out, kForwardResults); e.failure()) return e;
  const Shape s = shape_of(in, attributes);
  const double timeout_s = attribute<double>(attributes, "timeout_s");
  const int32_t seat = site->seats.seat_of(device);
  if (seat < 0)
    return xf::Error(xf::ErrorCode::kInternal, "jax_mok: GPU " + std::to_string(device) + " was not there when the first call was made");
  // a rank that raises must still take its place in the order of calls: its peers are in theirs
  const uint64_t generation = s.ranks > 1 ? site->seats.enter(seat, run.run_id, site) : 0;
  if (const Status left = take_failure(site->seats.host_status(seat)); !left.ok()) return to_error(left, s, timeout_s);
  const CudaForward call{s,
                         timeout_s,
                         static_cast<const int32_t*>(data(in, kCoords)),
                         data(in, kX),
                         static_cast<const int32_t*>(data(in, kIds)),
                         static_cast<const float*>(data(in, kWeights)),
                         data(in, kGate), data(in, kUp), data(in, kDown),
                         data(in, kSharedGate), data(in, kSharedUp), data(in, kSharedDown),
                         data(out, 0),
                         static_cast<int32_t*>(data(out, 1)),
                         static_cast<int32_t*>(data(out, 2)),
                         static_cast<int32_t*>(data(out, 3)),
                         data(out, kWorkspace)};
  const int failed = launch_forward(site->driver, site->kernels, site->seats, seat, generation, call, stream,
                                    site->seats.multiprocessors(seat));
  if (failed)
    return xf::Error(xf::ErrorCode::kInternal, "jax_mok: the CUDA driver refused a launch with error " + std::to_string(failed));
  return xf::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kCudaInstantiate, instantiate, xf::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kCudaForward, forward,
                       xf::Ffi::Bind().Ctx<xf::PlatformStream<void*>>().Ctx<xf::RunId>().Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<CudaCall>>().RemainingArgs().RemainingRets().Attrs());

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
  return {{"jax_mok_forward", reinterpret_cast<void*>(&with_registered_type<kCudaInstantiate>),
           reinterpret_cast<void*>(&with_registered_type<kCudaForward>)}};
}

}  // namespace mok::ffi
