// The Python module jax_mok._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/rank_call.h"
#include "../cpu/registry.h"
#include "cpu_handlers.h"
#include "cuda_handlers.h"

namespace nb = nanobind;

namespace {

mok::Shape shape_of(int32_t ranks, int32_t experts, int32_t top_k, int32_t elem_bytes, int64_t tokens, int64_t hidden,
                    int64_t inter, int64_t shared_inter, int64_t max_rows) {
  return {ranks, experts, top_k, elem_bytes, tokens, hidden, inter, shared_inter, max_rows};
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

// XLA calls the loader from a thread of its own while it compiles.
void set_cuda_loader(nb::callable load) {
  auto* const kept = new nb::callable(std::move(load));  // for the life of the process
  mok::ffi::set_cuda_loader([kept](int64_t hidden, int64_t inter, int64_t top_k, int64_t experts) {
    nb::gil_scoped_acquire gil;
    try {
      const auto found = nb::cast<nb::tuple>((*kept)(hidden, inter, top_k, experts));
      auto pointer = [&](int i) { return reinterpret_cast<void*>(nb::cast<uintptr_t>(found[i])); };
      return mok::ffi::CudaKernels{pointer(0), pointer(1), pointer(2)};
    } catch (const std::exception& e) {
      throw std::runtime_error(e.what());  // its text needs the lock that we hold here
    }
  });
}

// Calls run on threads of their own. The functions keep the lock of Python no longer than they run.
void set_board(nb::callable post, nb::callable read) {
  auto* const kept = new std::pair<nb::callable, nb::callable>(std::move(post), std::move(read));  // for good
  auto guarded = [](auto body) {
    nb::gil_scoped_acquire gil;
    try {
      return body();
    } catch (const std::exception& e) {
      throw std::runtime_error(e.what());  // its text needs the lock that we hold here
    }
  };
  mok::cpu::set_board({
      [=](const std::string& name, const std::string& text) { guarded([&] { kept->first(name, text); return 0; }); },
      [=](const std::string& name, double seconds) {
        return guarded([&]() -> std::unique_ptr<std::string> {
          const nb::object found = kept->second(name, seconds);
          return found.is_none() ? nullptr : std::make_unique<std::string>(nb::cast<std::string>(found));
        });
      },
  });
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The C++ side of jax_mok: the CPU backend and its XLA foreign calls.";

  m.def("cpu_handlers", [] { return capsules(mok::ffi::cpu_handlers()); },
        "Foreign call name -> capsules by stage, for jax.ffi.register_ffi_target.");
  m.def("cuda_handlers", [] { return capsules(mok::ffi::cuda_handlers()); }, "The same for CUDA.");
  m.def("set_cuda_loader", &set_cuda_loader,
        "Takes a function (hidden, inter, top_k, experts) -> addresses of (route kernel, forward kernel, host status).");

  m.def("set_board", &set_board,
        "Takes functions post(name, text) and read(name, seconds) -> text or None, by which processes find each other; "
        "forgets all EP groups that span processes.");

  m.def("padded_rows", [](int32_t p, int32_t e, int32_t k, int32_t b, int64_t t, int64_t h, int64_t i, int64_t s, int64_t r) {
    return mok::padded_rows(shape_of(p, e, k, b, t, h, i, s, r), mok::cpu::kTiles);
  }, "Rows of a rank's routed buffer, padding counted.");
  m.def("arena_bytes", [](int32_t p, int32_t e, int32_t k, int32_t b, int64_t t, int64_t h, int64_t i, int64_t s, int64_t r) {
    const auto layout = mok::arena_layout(shape_of(p, e, k, b, t, h, i, s, r), mok::cpu::kTiles);
    return layout.bytes + layout.flag_bytes;
  }, "Bytes of a rank's symmetric arena.");
  m.def("cuda_workspace_bytes", [](int32_t p, int32_t e, int32_t k, int32_t b, int64_t t, int64_t h, int64_t i, int64_t s, int64_t r) {
    return mok::ffi::cuda_workspace_bytes(shape_of(p, e, k, b, t, h, i, s, r));
  }, "Bytes of device memory that a forward call on a GPU works in.");
  m.def("isa", [] { return std::string(mok::cpu::tile_ops(4).isa); }, "Instruction set of the tile kernels in use.");
  m.def("held_bytes", &mok::cpu::held_bytes, "Bytes that the arenas and scratch memory of the process take.");
  m.def("release", &mok::cpu::release_all, "Frees the arenas and scratch memory of all groups without a call in flight.");
  m.def("poison_arenas", &mok::cpu::poison_all, "For tests: fills all arenas and scratch memory with NaN.");
}
