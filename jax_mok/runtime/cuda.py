"""CUDA devices of this process: what they can run, and kernels loaded on all of them before the first call."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax

from jax_mok.runtime import jit

_MAIN_SHARED_BYTES = 229376 + 256  # as in ffi/cuda_workspace.h
_DYNAMIC_SHARED_BYTES = {
    "mok_route": 34 * 1024 * 4 + 256,
    "mok_forward": _MAIN_SHARED_BYTES,
    "mok_backward": _MAIN_SHARED_BYTES,
}
_ARCH_OF = {"9.0": "sm_90a"}


def refusal() -> str | None:
    """Why this process has no CUDA kernels, or ``None``."""
    if not all(importlib.util.find_spec(m) for m in ("cuda.core", "cuda.bindings", "platformdirs")):
        return "the CUDA kernels need the packages of the extra jax_mok[cuda]"
    found = {d.compute_capability for d in jax.local_devices(backend="gpu")}
    if not found <= set(_ARCH_OF):
        return f"there are no kernels for compute capability {', '.join(sorted(found))} (only {', '.join(_ARCH_OF)})"
    return None


def macros(
    hidden: int, inter: int, top_k: int, shared_inter: int, save: bool = False, weight_grad_f32: bool = False
) -> dict[str, int]:
    """The compile-time shape of the kernels; ``shared_inter`` = 0: no shared expert; ``save``: residuals are kept;
    ``weight_grad_f32``: weight gradients for float32 master weights."""
    shape = {"MOK_HIDDEN": hidden, "MOK_INTER": inter, "MOK_TOP_K": top_k, "MOK_SHARED_INTER": shared_inter}
    return shape | {"MOK_SAVE": int(save), "MOK_WEIGHT_GRAD_F32": int(weight_grad_f32)}


def builds(kernel: str, hidden: int, inter: int, top_k: int, shared_inter: int) -> list[dict[str, int]]:
    """The macros of all builds of a kernel that calls of this shape may ask for."""
    saves = (False,) if kernel == "mok_route" else (False, True)
    weight_grads = (False, True) if kernel == "mok_backward" else (False,)
    return [macros(hidden, inter, top_k, shared_inter, save, f32) for save in saves for f32 in weight_grads]


def devices() -> list[int]:
    """CUDA ordinals of this process's GPUs."""
    return [d.local_hardware_id for d in jax.local_devices(backend="gpu")]


def unlinked() -> list[tuple[int, int]]:
    """Pairs of this process's GPUs, by ordinal, of which the first cannot read the memory of the second."""
    from cuda.bindings import driver  # pyright: ignore

    _check(driver.cuInit(0))
    handles = {ordinal: _check(driver.cuDeviceGet(ordinal)) for ordinal in devices()}
    pairs = [(a, b) for a in handles for b in handles if a != b]
    return [(a, b) for a, b in pairs if not _check(driver.cuDeviceCanAccessPeer(handles[a], handles[b]))]


def _check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the CUDA driver answered {error}")
    return values[0] if len(values) == 1 else values


def load(
    main: str, hidden: int, inter: int, top_k: int, shared_inter: int, save: bool, weight_grad_f32: bool
) -> tuple[int, int]:
    """Compiles the kernels of one pass (or takes them from the cache) and loads them on every local GPU.

    Returns the addresses of the route kernel and of the main kernel, "mok_forward" or "mok_backward".
    """
    capability = jax.local_devices(backend="gpu")[0].compute_capability
    return load_on(tuple(devices()), capability, main, hidden, inter, top_k, shared_inter, save, weight_grad_f32)


@functools.cache
def load_on(
    ordinals: tuple[int, ...],
    capability: str,
    main: str,
    hidden: int,
    inter: int,
    top_k: int,
    shared_inter: int,
    save: bool,
    weight_grad_f32: bool,
) -> tuple[int, int]:
    """The same on GPUs of this compute capability, without JAX."""
    from cuda.bindings import driver  # pyright: ignore

    _check(driver.cuInit(0))
    names, kernels = ("mok_route", main), []
    for name in names:
        of_main = (save, weight_grad_f32) if name == main else ()
        shape = macros(hidden, inter, top_k, shared_inter, *of_main)
        code = jit.cubin(name, _ARCH_OF[capability], shape)
        library = _check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        kernels.append(_check(driver.cuLibraryGetKernel(library, name.encode())))
    shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for ordinal in ordinals:
        handle = _check(driver.cuDeviceGet(ordinal))
        context = _check(driver.cuDevicePrimaryCtxRetain(handle))
        _check(driver.cuCtxPushCurrent(context))
        for name, kernel in zip(names, kernels, strict=True):
            _check(driver.cuKernelSetAttribute(shared, _DYNAMIC_SHARED_BYTES[name], kernel, handle))
            _check(driver.cuKernelGetFunction(kernel))  # loads it now, not at the first launch
        _check(driver.cuCtxPopCurrent())
    return int(kernels[0]), int(kernels[1])
