"""The native module: loaded once, its foreign calls registered with XLA on import."""

from __future__ import annotations

import importlib
from typing import Any

import jax

from jax_mok._call import Call
from jax_mok.runtime import cuda, processes

_native: Any = None
_why: str | None = None
try:
    _native = importlib.import_module("jax_mok._native")
except ModuleNotFoundError:  # a source tree as it is; "xla" and "reference" still work
    _why = "the native module jax_mok._native is not built; install the package with pip"
except ImportError as error:
    _why = f"the native module jax_mok._native cannot be loaded ({error}); reinstall the package"
else:
    for _platform, _handlers in (("cpu", _native.cpu_handlers()), ("CUDA", _native.cuda_handlers())):
        for _name, _stages in _handlers.items():
            jax.ffi.register_ffi_target(_name, _stages, platform=_platform)
    _native.set_cuda_host(cuda.load, processes.gpu_seating, processes.gpu_share, processes.gpu_agree)
    processes.attach(_native)


def load_error() -> str | None:
    """Why the native module cannot be used, or ``None``."""
    return _why


def native() -> Any:
    """The native module. Raises ``RuntimeError`` if it is not built."""
    if _native is None:
        raise RuntimeError(_why)
    return _native


def shape_of(call: Call) -> tuple[int, ...]:
    """The fields of ``Shape`` in cuda/core/types.h, as the native module takes them."""
    elem_bytes = {"bfloat16": 2, "float32": 4}[call.dtype]
    return (
        call.ranks,
        call.experts,
        call.top_k,
        elem_bytes,
        call.tokens,
        call.hidden,
        call.inter,
        call.shared_inter,
        call.max_rows,
    )


def padded_rows(call: Call, backend: str) -> int:
    """Rows of a rank's routed buffer: its capacity plus the padding of expert segments."""
    return (native().cuda_padded_rows if backend == "cuda" else native().padded_rows)(shape_of(call))


def workspace_bytes(call: Call, backend: str, *, save: bool) -> int:
    """Bytes of device memory that a forward call works in, beside its results; with ``save``, it keeps residuals."""
    return native().cuda_workspace_bytes(shape_of(call), save) if backend == "cuda" else 0


def backward_bytes(call: Call, backend: str, *, save: bool) -> int:
    """The same of a backward call; with ``save``, the forward call has kept the residuals."""
    return native().cuda_backward_bytes(shape_of(call), not save) if backend == "cuda" else 0


def arena_bytes(call: Call, backend: str) -> int:
    """Bytes of a rank's symmetric arena for this call."""
    if backend == "cuda":
        return native().cuda_arena_bytes(shape_of(call)) if call.ranks > 1 else 0
    return native().arena_bytes(shape_of(call))


def release() -> None:
    """Gives the memory of idle EP groups back. The next call takes what it needs again; harmless at any time."""
    if _native is not None:
        _native.release()


def held_bytes() -> int:
    """Bytes of host memory that the arenas and scratch buffers of this process take (outside XLA's allocator)."""
    return 0 if _native is None else _native.held_bytes()


def device_held_bytes() -> int:
    """Bytes of GPU memory that the arenas of this process take, over all of its GPUs (outside XLA's allocator)."""
    return 0 if _native is None else _native.cuda_held_bytes()
