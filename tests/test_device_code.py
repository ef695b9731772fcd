"""cuda/core is one source for host and device: NVRTC compiles all of it for every GPU we know. That takes no GPU."""

import io
from pathlib import Path

import pytest

try:  # by name: without the package, this repository's own directory cuda/core is found as an empty module
    from cuda.core import Program, ProgramOptions
except ImportError:
    pytest.skip("needs cuda-core: pip install 'jax_mok[cuda]'", allow_module_level=True)

CUDA = Path(__file__).parent.parent / "cuda"
ARCHITECTURES = ["sm_90a", "sm_100a", "sm_103a"]

# Everything a kernel asks of core/: routes from counts, both streams, pulling rows by source, the arena and its flags.
# Results are stored, lest the compiler drop what it should check.
KERNEL = """
using namespace mok;

__device__ void route(const int32_t* ids, const Shape& s, const Tiles& t, int32_t me, int32_t* counts, int32_t* cursor,
                      int32_t* sorted, Routes routes, int64_t* out) {
  out[0] = count_slots(ids, s.slots(), s.experts, counts);
  sort_slots(ids, s.slots(), s.experts, counts, cursor, sorted);
  build_routes(counts, s, t.block_m, me, routes);
  out[1] = over_capacity(routes, s);
  for_each_source(counts, s, me, 0, t.block_m, [&](int32_t source) { return routes.list[source]; },
                  [&](const SourceRun& run) { out[2 + run.source] = run.row + run.rows + run.position; });
}

__device__ void stream(const StreamShape& s, int32_t* by_length, Task* tasks, int64_t* out) {
  order_by_length(s.segments, s.segment_count(), by_length);
  int64_t n = 0;
  forward_stream(s, [&](const Task& task) { tasks[n++] = task; });
  backward_stream(s, [&](const Task& task) { tasks[n++] = task; });
  out[0] = n;
}

__device__ void arena(const Shape& s, const Tiles& t, unsigned char* base, uint64_t* flags, int64_t* out) {
  const ArenaLayout layout = arena_layout(s, t);
  Verdict verdict{{Code::over_capacity, 1, 2, 3}, shape_digest(s)};
  if (abort_generation(flags[FlagLayout::index(FlagLayout::aborted, 0, s.ranks)]) > 0)
    verdict.status = abort_status(pack_abort(7, Wait::rows, 3));
  *reinterpret_cast<Verdict*>(base + layout.verdict) = verdict;
  out[0] = layout.bytes + layout.flag_bytes + verdict.status.ok();
}

extern "C" __global__ void use_core(Shape s, Tiles t, const int32_t* ids, int32_t me, int32_t* scratch, Routes routes,
                                    StreamShape shape, Task* tasks, unsigned char* base, uint64_t* flags,
                                    int64_t* out) {
  route(ids, s, t, me, scratch, scratch + s.experts, scratch + 2 * s.experts, routes, out);
  stream(shape, scratch, tasks, out + 64);
  arena(s, t, base, flags, out + 65);
}
"""


HEADERS = sorted((CUDA / "core").glob("*.h"))


def include(headers) -> str:
    return "".join(f'#include "core/{header.name}"\n' for header in headers)


def compile_cubin(source: str, arch: str) -> tuple[bytes, str]:
    options = ProgramOptions(arch=arch, std="c++17", include_path=[str(CUDA)])
    log = io.StringIO()
    # to a cubin: for PTX, cuda.core would ask the driver which version it takes, and there may be none
    cubin = Program(source, "c++", options).compile("cubin", logs=log)
    return bytes(cubin.code), log.getvalue()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_core_compiles_for_the_device_without_a_warning(arch):
    code, log = compile_cubin(include(HEADERS) + KERNEL, arch)
    assert not log.strip(), log
    assert b"use_core" in code


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.name)
def test_every_core_header_stands_on_its_own(header):
    compile_cubin(include([header]), "sm_90a")
