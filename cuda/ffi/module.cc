// The Python module jax_mok._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/rank_call.h"
#include "../cpu/registry.h"
#include "call_frame.h"
#include "cpu_handlers.h"
#include "cuda_backward.h"
#include "cuda_handlers.h"

namespace nb = nanobind;

namespace {

// ranks, experts, top_k, elem_bytes, tokens, hidden, inter, shared_inter, max_rows
mok::Shape shape_from(const std::vector<int64_t>& s) {
  auto small = [&](size_t i) { return int32_t(s.at(i)); };
  return {small(0), small(1), small(2), small(3), s.at(4), s.at(5), s.at(6), s.at(7), s.at(8)};
}

nb::dict capsules(const std::vector<mok::ffi::Handler>& handlers) {
  nb::dict all;
  for (const auto& h : handlers) {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(h.instantiate);
    stages["execute"] = nb::capsule(h.execute);
    all[h.name] = stages;
  }
  return all;
}

// XLA calls these from a thread of its own while it compiles. They are kept for the life of the process.
template <class Body>
auto with_python(Body body) {
  nb::gil_scoped_acquire gil;
  try {
    return body();
  } catch (const std::exception& e) {
    throw std::runtime_error(e.what());  // its text needs the lock that we hold here
  }
}

constexpr const char* kSharings[] = {"none", "file descriptors", "fabric handles"};  // as enum Sharing

mok::ffi::Sharing sharing_named(const std::string& name) {
  for (int i = 0; i < 3; ++i)
    if (name == kSharings[i]) return mok::ffi::Sharing(i);
  throw std::runtime_error("no way to share memory: " + name);
}

// A file descriptor, bytes, or None for a GPU of one's own.
nb::object to_python(const mok::ffi::MemoryHandle& h) {
  if (h.fd >= 0) return nb::int_(h.fd);
  return h.fabric.empty() ? nb::object(nb::none()) : nb::object(nb::bytes(h.fabric.data(), h.fabric.size()));
}
mok::ffi::MemoryHandle from_python(nb::handle h) {
  if (h.is_none()) return {};
  if (nb::isinstance<nb::int_>(h)) return {nb::cast<int>(h), {}};
  const auto fabric = nb::cast<nb::bytes>(h);
  return {-1, {fabric.c_str(), fabric.size()}};
}

void set_cuda_host(nb::callable load, nb::callable seating, nb::callable share, nb::callable agree) {
  struct Functions {
    nb::callable load, seating, share, agree;
  };
  auto* const f = new Functions{std::move(load), std::move(seating), std::move(share), std::move(agree)};
  mok::ffi::CudaHost host;
  host.load = [f](const char* main, int64_t hidden, int64_t inter, int64_t top_k, int64_t shared_inter, bool save,
                  bool weight_grad_f32) {
    return with_python([&] {
      const auto found = nb::cast<nb::tuple>(f->load(main, hidden, inter, top_k, shared_inter, save, weight_grad_f32));
      auto pointer = [&](int i) { return reinterpret_cast<void*>(nb::cast<uintptr_t>(found[i])); };
      return mok::ffi::CudaKernels{pointer(0), pointer(1)};
    });
  };
  host.seating = [f](const std::string& span, double patience_s) {
    return with_python([&] {
      const auto found = nb::cast<nb::tuple>(f->seating(span, patience_s));
      return mok::ffi::CudaHost::Seating{nb::cast<std::string>(found[0]), nb::cast<std::vector<int>>(found[1]),
                                         sharing_named(nb::cast<std::string>(found[2]))};
    });
  };
  host.share = [f](const std::string& seating, const std::string& piece, int64_t bytes,
                   const std::vector<mok::ffi::MemoryHandle>& mine, double patience_s) {
    return with_python([&] {
      nb::list given;
      for (const auto& handle : mine) given.append(to_python(handle));
      std::vector<mok::ffi::MemoryHandle> all;
      for (nb::handle handle : nb::cast<nb::list>(f->share(seating, piece, bytes, given, patience_s)))
        all.push_back(from_python(handle));
      return all;
    });
  };
  host.agree = [f](const std::string& seating, uint64_t round, uint64_t next) {
    return with_python([&] { return nb::cast<uint64_t>(f->agree(seating, round, next)); });
  };
  mok::ffi::set_cuda_host(std::move(host));
}

// Why memory of a GPU cannot be shared between processes this way; "" = it can.
std::string sharing_refusal(int device, const std::string& how) {
  const mok::ffi::CudaDriver* const driver = mok::ffi::CudaDriver::get();
  if (driver == nullptr) return "libcuda.so.1 cannot be loaded";
  try {
    driver->try_sharing(device, sharing_named(how));
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

// The first ten of a call's addresses, by which both passes begin.
mok::ffi::CudaInputs inputs_at(const std::vector<int64_t>& shape, double timeout_s, const std::vector<uintptr_t>& b) {
  auto at = [&](size_t i) { return reinterpret_cast<void*>(b.at(i)); };
  return {shape_from(shape), timeout_s, static_cast<int32_t*>(at(0)), at(1), static_cast<int32_t*>(at(2)),
          static_cast<float*>(at(3)), at(4), at(5), at(6), at(7), at(8), at(9)};
}
mok::ffi::CudaForward forward_at(const mok::ffi::CudaInputs& inputs, const std::vector<uintptr_t>& b) {
  auto at = [&](size_t i) { return reinterpret_cast<void*>(b.at(i)); };
  auto ints = [&](size_t i) { return static_cast<int32_t*>(at(i)); };
  return {inputs, at(10), {at(15), at(16), at(17), at(18), at(19)}, ints(11), ints(12), ints(13), at(14)};
}
template <int32_t kWeightGradBytes>
mok::ffi::CudaBackward backward_at(const mok::ffi::CudaInputs& inputs, const std::vector<uintptr_t>& b) {
  auto at = [&](size_t i) { return reinterpret_cast<void*>(b.at(i)); };
  return {inputs, {at(10), at(11), at(12), at(13), at(14)}, at(15), at(16), at(17), at(18), at(19), at(20), at(21),
          at(22), at(23), kWeightGradBytes, at(24)};
}

// A rank's call without XLA, on any stream: several ranks can share one GPU. For tests.
template <auto kLaunch, auto kCall>
int launch_at(const mok::ffi::CudaSeats& seats, int32_t seat, uint64_t generation, uint64_t acknowledged,
              std::pair<uintptr_t, uintptr_t> kernels, const std::vector<int64_t>& shape, double timeout_s,
              const std::vector<uintptr_t>& addresses, uintptr_t stream, int multiprocessors) {
  return kLaunch(*mok::ffi::CudaDriver::get(),
                 {reinterpret_cast<void*>(kernels.first), reinterpret_cast<void*>(kernels.second)}, seats, seat,
                 {generation, acknowledged, {}, 0}, kCall(inputs_at(shape, timeout_s, addresses), addresses),
                 reinterpret_cast<void*>(stream), multiprocessors);
}

// (code, rank, value, extra) of the last failed call of a seat, which is then forgotten.
std::vector<int64_t> take_failure(const mok::ffi::CudaSeats& seats, int32_t seat) {
  mok::HostStatus* const status = seats.host_status(seat);
  const auto code = int64_t(__atomic_exchange_n(&status->code, 0, __ATOMIC_ACQUIRE));
  return {code, status->rank, status->value, status->extra};
}

// Calls run on threads of their own. The functions keep the lock of Python no longer than they run.
void set_board(nb::callable post, nb::callable read) {
  auto* const kept = new std::pair<nb::callable, nb::callable>(std::move(post), std::move(read));  // for good
  mok::cpu::set_board({
      [=](const std::string& name, const std::string& text) { with_python([&] { kept->first(name, text); return 0; }); },
      [=](const std::string& name, double seconds) {
        return with_python([&]() -> std::unique_ptr<std::string> {
          const nb::object found = kept->second(name, seconds);
          return found.is_none() ? nullptr : std::make_unique<std::string>(nb::cast<std::string>(found));
        });
      },
  });
  mok::ffi::forget_site_numbers();
  const nb::gil_scoped_release released;
  mok::ffi::forget_spanning_cuda_seats();
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The C++ side of jax_mok: the CPU backend and its XLA foreign calls.";

  m.def("cpu_handlers", [] { return capsules(mok::ffi::cpu_handlers()); },
        "Foreign call name -> capsules by stage, for jax.ffi.register_ffi_target.");
  m.def("cuda_handlers", [] { return capsules(mok::ffi::cuda_handlers()); }, "The same for CUDA.");
  m.def("set_cuda_host", &set_cuda_host,
        "Takes the functions of a CudaHost: load(main kernel's name, hidden, inter, top_k, shared_inter, save, "
        "weight_grad_f32) -> addresses of (route kernel, main kernel); seating(span, seconds) -> (name, CUDA ordinals or "
        "-1, way to share memory); "
        "share(seating, piece, bytes, handles, seconds) -> all handles; agree(seating, round, next) -> call.");
  m.def("stop_watching", &mok::ffi::stop_watching_cuda_seats, nb::call_guard<nb::gil_scoped_release>(),
        "Ends the threads that watch GPUs of EP groups that span processes.");
  m.def("cuda_devices", [] {
    const auto* driver = mok::ffi::CudaDriver::get();
    return driver == nullptr ? 0 : driver->devices();
  }, "GPUs that this process can see; 0 without a driver.");
  m.def("cuda_sharing_refusal", &sharing_refusal, nb::call_guard<nb::gil_scoped_release>(),
        "Why memory of a GPU cannot be shared between processes by \"file descriptors\" or \"fabric handles\"; \"\" = it can.");

  m.def("set_board", &set_board,
        "Takes functions post(name, text) and read(name, seconds) -> text or None, by which processes find each other; "
        "forgets all EP groups that span processes.");

  m.def("padded_rows", [](const std::vector<int64_t>& shape) {
    return mok::padded_rows(shape_from(shape), mok::cpu::kTiles);
  }, "Rows of a rank's routed buffer on a CPU, padding counted.");
  m.def("cuda_padded_rows", [](const std::vector<int64_t>& shape) {
    return mok::ffi::extent_of(shape_from(shape)).rows;
  }, "The same on a GPU.");
  m.def("arena_bytes", [](const std::vector<int64_t>& shape) {
    const auto layout = mok::arena_layout(shape_from(shape), mok::cpu::kTiles);
    return layout.bytes + layout.flag_bytes;
  }, "Bytes of a rank's symmetric arena on a CPU.");
  m.def("cuda_arena_bytes", [](const std::vector<int64_t>& shape) {
    return mok::ffi::cuda_arena_layout(shape_from(shape)).bytes;
  }, "Bytes of a rank's symmetric arena on a GPU, flags not counted.");
  m.def("cuda_held_bytes", &mok::ffi::cuda_held_bytes, nb::call_guard<nb::gil_scoped_release>(), "Bytes of device memory that the arenas of the process take.");
  m.def("cuda_workspace_bytes", [](const std::vector<int64_t>& shape, bool save) {
    return mok::ffi::cuda_workspace_bytes(shape_from(shape), save);
  }, "Bytes of device memory that a forward call on a GPU works in.");
  m.def("cuda_backward_bytes", [](const std::vector<int64_t>& shape, bool recompute) {
    return mok::ffi::cuda_backward_bytes(shape_from(shape), recompute);
  }, "The same of a backward call.");
  nb::class_<mok::ffi::CudaSeats>(m, "CudaSeats", "GPUs as seats of EP groups, with arenas of their own. For tests.")
      .def("__init__", [](mok::ffi::CudaSeats* self, const std::vector<int>& devices) {
        if (mok::ffi::CudaDriver::get() == nullptr) throw std::runtime_error("libcuda.so.1 cannot be loaded");
        new (self) mok::ffi::CudaSeats(*mok::ffi::CudaDriver::get(), devices);
      })
      .def("reserve", [](mok::ffi::CudaSeats& seats, const std::vector<int64_t>& s) {
        const mok::Shape shape = shape_from(s);
        seats.reserve(mok::ffi::cuda_arena_layout(shape), mok::max_blocks(shape, mok::ffi::kCudaTiles), 0);
      })
      .def("bytes", &mok::ffi::CudaSeats::bytes)
      .def("memory", [](const mok::ffi::CudaSeats& seats, int32_t seat) { return reinterpret_cast<uintptr_t>(seats.memory(seat)); })
      .def("take_failure", &take_failure)
      .def("launch_forward", &launch_at<&mok::ffi::launch_forward, &forward_at>)
      .def("launch_backward", &launch_at<&mok::ffi::launch_backward, &backward_at<2>>)
      .def("launch_backward_f32", &launch_at<&mok::ffi::launch_backward, &backward_at<4>>);  // weight gradients in f32

  m.def("isa", [] { return std::string(mok::cpu::tile_ops(4).isa); }, "Instruction set of the tile kernels in use.");
  m.def("held_bytes", &mok::cpu::held_bytes, "Bytes that the arenas and scratch memory of the process take.");
  m.def("release", &mok::cpu::release_all, "Frees the arenas and scratch memory of all groups without a call in flight.");
  m.def("poison_arenas", &mok::cpu::poison_all, "For tests: fills all arenas and scratch memory with NaN.");
}
