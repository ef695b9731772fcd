// XLA FFI handlers for the platform "CUDA". Execute only encodes tensor maps and launches: everything else happened
// when XLA instantiated the call.
#include "cuda_handlers.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "../device/params.h"
#include "call_frame.h"
#include "cuda_driver.h"

namespace mok::ffi {
namespace {

constexpr Tiles kTiles = {/*block_m=*/128, /*inter_n=*/128, /*hidden_n=*/256, 0, 0, 0, /*lag=*/1};
constexpr unsigned kForwardThreads = 384, kRouteThreads = 1024;
constexpr unsigned kForwardShared = 229376 + 256;  // stages, store buffers, barriers: as in device/sm90/forward.cu

CudaLoader& loader() {
  static CudaLoader* const l = new CudaLoader;
  return *l;
}

struct CudaCall {
  static xf::TypeId id;
  CudaKernels kernels;
};
xf::TypeId CudaCall::id = {};

xf::ErrorOr<std::unique_ptr<CudaCall>> instantiate(xf::Dictionary attributes) {
  auto number = [&](std::string_view name) { return attribute<int64_t>(attributes, name); };
  try {
    return std::make_unique<CudaCall>(CudaCall{loader()(number("hidden"), number("inter"), number("top_k"), number("experts"))});
  } catch (const std::exception& e) {
    return xf::Unexpected(xf::Error(xf::ErrorCode::kInternal, std::string("jax_mok: loading CUDA kernels failed: ") + e.what()));
  }
}

// The error that an earlier call left behind, if any. A kernel cannot raise; the next call on the host does.
Status take_failure(void* host) {
  auto* status = static_cast<HostStatus*>(host);
  const uint64_t code = __atomic_exchange_n(&status->code, 0, __ATOMIC_ACQUIRE);
  return {Code(code), 0, status->value, status->extra};
}

// Hands out 256-byte-aligned pieces; without a base it only adds up.
class Pieces {
 public:
  explicit Pieces(uint8_t* base) : base_(base) {}
  template <class T>
  T* take(int64_t n) {
    T* here = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at_);
    at_ += align_up(n * int64_t{sizeof(T)}, 256);
    return here;
  }
  int64_t bytes() const { return at_; }

 private:
  uint8_t* base_;
  int64_t at_ = 0;
};

struct Workspace {
  uint16_t *rows_in, *hidden, *rows_y;
  RouteTables routes;
  int64_t rows, pairs, bytes;
};

Workspace lay_out(const Shape& s, uint8_t* base) {
  Pieces p(base);
  Workspace w{};
  w.rows = padded_rows(s, kTiles);
  w.pairs = w.rows / kTiles.block_m;
  const int64_t tiles = ceil_div(s.inter, kTiles.inter_n) + ceil_div(s.hidden, kTiles.hidden_n);
  w.rows_in = p.take<uint16_t>(w.rows * s.hidden);
  w.hidden = p.take<uint16_t>(w.rows * s.inter);
  w.rows_y = p.take<uint16_t>(w.rows * s.hidden);
  w.routes = {p.take<int32_t>(w.rows),  p.take<int32_t>(w.rows),  p.take<int32_t>(s.slots()),
              p.take<int32_t>(w.pairs), p.take<int32_t>(w.pairs), p.take<int32_t>(w.pairs),
              p.take<PairTask>(w.pairs * tiles), p.take<int32_t>(2),
              p.take<uint32_t>(Counter::arrays + 3 * w.pairs)};
  w.bytes = p.bytes();
  return w;
}

// Boxes of 64 columns: [rows, columns] arrays by rows, [experts, rows, columns] weights by 64 rows.
int encode_rows(const CudaDriver& cuda, TensorMap* map, const void* base, int64_t rows, int64_t columns, uint32_t box_rows) {
  const uint64_t dims[] = {uint64_t(columns), uint64_t(rows)}, strides[] = {uint64_t(columns) * 2};
  const uint32_t box[] = {64, box_rows};
  return cuda.encode(map, base, 2, dims, strides, box);
}
int encode_weights(const CudaDriver& cuda, TensorMap* map, const void* base, int64_t experts, int64_t rows, int64_t columns) {
  const uint64_t dims[] = {uint64_t(columns), uint64_t(rows), uint64_t(experts)};
  const uint64_t strides[] = {uint64_t(columns) * 2, uint64_t(rows) * uint64_t(columns) * 2};
  const uint32_t box[] = {64, 64, 1};
  return cuda.encode(map, base, 3, dims, strides, box);
}

unsigned route_shared_bytes(int32_t experts) { return unsigned(32 * experts * 4 + 4 * (4 * experts + 3) + 64); }

xf::Error forward(void* stream, CudaCall* call, xf::RemainingArgs in, xf::RemainingRets out, xf::Dictionary attributes) {
  if (xf::Error e = check_counts(in, kForwardOperands, out, kForwardResults); e.failure()) return e;
  const Shape s = shape_of(in, attributes);
  const double timeout_s = attribute<double>(attributes, "timeout_s");
  if (const Status left = take_failure(call->kernels.host_status); !left.ok()) return to_error(left, s, timeout_s);
  const CudaDriver* cuda = CudaDriver::get();
  if (cuda == nullptr) return xf::Error(xf::ErrorCode::kInternal, "jax_mok: libcuda.so.1 cannot be loaded");
  const Workspace w = lay_out(s, static_cast<uint8_t*>(data(out, kWorkspace)));
  auto* host = static_cast<HostStatus*>(call->kernels.host_status);

  RouteParams route{w.routes,
                    static_cast<const int32_t*>(data(in, kIds)),
                    static_cast<int32_t*>(data(out, 1)),
                    static_cast<int32_t*>(data(out, 2)),
                    static_cast<int32_t*>(data(out, 3)),
                    s.tokens,
                    s.max_rows,
                    w.pairs,
                    host};
  ForwardParams params{};
  int failed = 0;
  failed |= encode_rows(*cuda, &params.rows, w.rows_in, w.rows, s.hidden, 128);
  failed |= encode_rows(*cuda, &params.hidden, w.hidden, w.rows, s.inter, 128);
  failed |= encode_rows(*cuda, &params.hidden_out, w.hidden, w.rows, s.inter, 16);
  failed |= encode_rows(*cuda, &params.y_out, w.rows_y, w.rows, s.hidden, 16);
  failed |= encode_weights(*cuda, &params.gate, data(in, kGate), s.experts, s.hidden, s.inter);
  failed |= encode_weights(*cuda, &params.up, data(in, kUp), s.experts, s.hidden, s.inter);
  failed |= encode_weights(*cuda, &params.down, data(in, kDown), s.experts, s.inter, s.hidden);
  params.routes = w.routes;
  params.x = static_cast<const uint16_t*>(data(in, kX));
  params.router_weights = static_cast<const float*>(data(in, kWeights));
  params.rows_in = w.rows_in;
  params.rows_y = w.rows_y;
  params.y = static_cast<uint16_t*>(data(out, 0));
  params.tokens = s.tokens;
  params.max_pairs = w.pairs;
  params.deadline_ns = uint64_t(timeout_s * 1e9);
  params.host_status = host;
  if (!failed) failed = cuda->launch(call->kernels.route, 1, kRouteThreads, route_shared_bytes(s.experts), stream, &route);
  if (!failed) failed = cuda->launch(call->kernels.forward, 132, kForwardThreads, kForwardShared, stream, &params);
  if (failed)
    return xf::Error(xf::ErrorCode::kInternal, "jax_mok: the CUDA driver refused a launch with error " + std::to_string(failed));
  return xf::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kCudaInstantiate, instantiate, xf::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kCudaForward, forward,
                       xf::Ffi::Bind().Ctx<xf::PlatformStream<void*>>().Ctx<xf::State<CudaCall>>()
                           .RemainingArgs().RemainingRets().Attrs());

namespace {

template <const auto& kHandler>
XLA_FFI_Error* with_registered_type(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const error = register_type_once<CudaCall>(frame->api, "jax_mok_cuda_call");
  return error != nullptr ? error : kHandler(frame);
}

}  // namespace

int64_t cuda_workspace_bytes(const Shape& shape) { return lay_out(shape, nullptr).bytes; }

void set_cuda_loader(CudaLoader l) { loader() = std::move(l); }

std::vector<Handler> cuda_handlers() {
  return {{"jax_mok_forward", reinterpret_cast<void*>(&with_registered_type<kCudaInstantiate>),
           reinterpret_cast<void*>(&with_registered_type<kCudaForward>)}};
}

}  // namespace mok::ffi
