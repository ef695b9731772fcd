// XLA FFI handlers for the platform "CUDA". Execute only encodes tensor maps and launches: everything else happened
// when XLA instantiated the call.
#include "cuda_handlers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "call_frame.h"
#include "cuda_backward.h"

namespace mok::ffi {
namespace {

// What the process knows of its GPUs; never destroyed: calls may still run at exit.
struct Process {
  CudaHost host;
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<CudaSeats>> seats;  // by name; "": this process's own
};

Process& process() {
  static Process* const p = new Process;
  return *p;
}

std::shared_ptr<CudaSeats> seats_for(const CudaDriver& driver, const std::string& span, double patience_s) {
  Process& p = process();
  // takes Python's lock, which must not be waited for under ours
  const CudaHost::Seating seating = p.host.seating(span, patience_s);
  const std::string name = seating.name;
  auto share = [&p, name](const std::string& piece, int64_t bytes, const std::vector<MemoryHandle>& mine, double patience) {
    return p.host.share(name, piece, bytes, mine, patience);
  };
  CallOrder::Agree agree;
  if (!name.empty()) agree = [&p, name](uint64_t round, uint64_t next) { return p.host.agree(name, round, next); };
  std::lock_guard<std::mutex> lock(p.mutex);
  if (const auto it = p.seats.find(name); it != p.seats.end()) return it->second;
  const auto seats = std::make_shared<CudaSeats>(driver, seating.devices, seating.sharing, share, agree);
  p.seats[name] = seats;
  return seats;
}

std::vector<std::shared_ptr<CudaSeats>> all_seats() {
  Process& p = process();
  std::lock_guard<std::mutex> lock(p.mutex);
  std::vector<std::shared_ptr<CudaSeats>> all;
  for (const auto& item : p.seats) all.push_back(item.second);
  return all;
}

// One per call site of a compiled program, shared by all devices that run it.
struct CudaCall {
  static xf::TypeId id;
  const CudaDriver& driver;
  const std::shared_ptr<CudaSeats> seats;
  const CudaKernels kernels;
  const uint64_t number;
  const bool spans_processes;
  std::atomic<uint64_t> first_generation{0};

  // Other processes may still be compiling when this one runs the program for the first time.
  bool is_first(uint64_t generation) {
    uint64_t none = 0;
    first_generation.compare_exchange_strong(none, generation);
    return spans_processes && first_generation == generation;
  }
};
xf::TypeId CudaCall::id = {};

Shape arena_shape(const xf::Dictionary& attributes) {
  auto number = [&](std::string_view name) { return attribute<int64_t>(attributes, name); };
  return {int32_t(number("ranks")), int32_t(number("experts")), int32_t(number("top_k")), 2, number("tokens"),
          number("hidden"), number("inter"), number("shared_inter"), number("max_rows")};
}

xf::ErrorOr<std::unique_ptr<CudaCall>> prepare(const xf::Dictionary& attributes, const char* main,
                                               bool weight_grad_f32) {
  try {
    const CudaDriver* driver = CudaDriver::get();
    if (driver == nullptr) throw std::runtime_error("libcuda.so.1 cannot be loaded");
    const Shape s = arena_shape(attributes);
    const std::string span(attribute<std::string_view>(attributes, "span"));
    const auto patience_s = attribute<double>(attributes, "first_call_timeout_s");
    const bool save = attribute<int64_t>(attributes, "save") != 0;
    const CudaKernels kernels =
        process().host.load(main, s.hidden, s.inter, s.top_k, s.shared_inter, save, weight_grad_f32);
    const std::shared_ptr<CudaSeats> seats = seats_for(*driver, span, patience_s);
    if (s.ranks > 1) seats->reserve(cuda_arena_layout(s), max_blocks(s, kCudaTiles), patience_s);
    return std::unique_ptr<CudaCall>(new CudaCall{*driver, seats, kernels, site_number(main, attributes), !span.empty()});
  } catch (const std::exception& e) {
    return xf::Unexpected(xf::Error(xf::ErrorCode::kInternal, std::string("jax_mok: preparing a CUDA call failed: ") + e.what()));
  }
}

xf::ErrorOr<std::unique_ptr<CudaCall>> prepare_forward(xf::Dictionary attributes) {
  return prepare(attributes, "mok_forward", false);
}
xf::ErrorOr<std::unique_ptr<CudaCall>> prepare_backward(xf::Dictionary attributes) {
  return prepare(attributes, "mok_backward", weight_grad_bytes(attributes) == 4);
}

// Where and when a call runs, or the error that an earlier one left behind.
struct Entry {
  int32_t seat;
  CallOrder::Place place;
};

xf::Error enter(CudaCall* site, xf::RunId run, int32_t device, const xf::Dictionary& attributes, CudaInputs* c, Entry* entry) {
  CudaSeats& seats = *site->seats;
  entry->seat = seats.seat_of(device);
  if (entry->seat < 0)
    return xf::Error(xf::ErrorCode::kInternal, "jax_mok: GPU " + std::to_string(device) + " was not there when the first call was made");
  if (c->shape.ranks > 1 || seats.count() > 1)
    entry->place = seats.order().enter(entry->seat, run.run_id, {site, site->number}, runs_alone(attributes));
  else
    entry->place = {1, 0, seats.order().take_failure(entry->seat), 0};
  const Status& raise = entry->place.raise;
  if (!raise.ok()) return to_error(raise, c->shape, c->timeout_s);
  if (site->is_first(entry->place.generation))
    c->timeout_s = std::max(c->timeout_s, attribute<double>(attributes, "first_call_timeout_s"));
  return xf::Error::Success();
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
  if (xf::Error e = enter(site, run, device, attributes, &call, &entry); e.failure()) return e;
  return launched(launch_forward(site->driver, site->kernels, *site->seats, entry.seat, entry.place, call, stream,
                                 site->seats->multiprocessors(entry.seat)));
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
                    weight_grad_bytes(attributes),
                    data(out, kBackwardResults - 1)};
  if (attribute<int64_t>(attributes, "save") != 0)
    for (size_t i = 0; i < kSavedBuffers; ++i) call.saved[i] = data(in, kForwardOperands + i);
  Entry entry;
  if (xf::Error e = enter(site, run, device, attributes, &call, &entry); e.failure()) return e;
  return launched(launch_backward(site->driver, site->kernels, *site->seats, entry.seat, entry.place, call, stream,
                                  site->seats->multiprocessors(entry.seat)));
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

void set_cuda_host(CudaHost host) { process().host = std::move(host); }

void forget_spanning_cuda_seats() {
  std::vector<std::shared_ptr<CudaSeats>> gone;  // freed after the lock
  Process& p = process();
  std::lock_guard<std::mutex> lock(p.mutex);
  for (auto it = p.seats.begin(); it != p.seats.end();) {
    if (!it->first.empty()) {
      it->second->forget();  // a compiled program may keep them
      gone.push_back(it->second);
    }
    it = it->first.empty() ? std::next(it) : p.seats.erase(it);
  }
}

void stop_watching_cuda_seats() {
  for (const auto& seats : all_seats()) seats->stop_watching();
}

int64_t cuda_held_bytes() {
  int64_t bytes = 0;
  for (const auto& seats : all_seats()) bytes += seats->bytes();
  return bytes;
}

std::vector<Handler> cuda_handlers() {
  return {{"jax_mok_forward", reinterpret_cast<void*>(&with_registered_type<kPrepareForward>),
           reinterpret_cast<void*>(&with_registered_type<kCudaForward>)},
          {"jax_mok_backward", reinterpret_cast<void*>(&with_registered_type<kPrepareBackward>),
           reinterpret_cast<void*>(&with_registered_type<kCudaBackward>)}};
}

}  // namespace mok::ffi
