"""Devices and the mesh: real GPUs where there are some, otherwise virtual CPU devices."""

from __future__ import annotations

import os

import jax
from jax.sharding import AxisType, Mesh

from jax_mok.demo.settings import SettingsError

_FLAG = "xla_force_host_platform_device_count"
_DETERMINISTIC = "xla_gpu_deterministic_ops"
_MOST = 8


def reproducible() -> None:
    """Has XLA compute its own part of a step on GPUs the same way every time, sums over an embedding's tokens above
    all. Call before anything that touches a device."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _DETERMINISTIC not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_DETERMINISTIC}=true".strip()


def request(count: int | None) -> None:
    """Asks for ``count`` virtual CPU devices (``None``: eight). Call before anything that touches a device; GPUs are
    not affected."""
    count = _MOST if count is None else count
    if _FLAG in os.environ.get("XLA_FLAGS", ""):
        return  # the caller has decided, and JAX refuses to be told twice
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # JAX is running already; expert_mesh says so if there are too few


def expert_mesh(count: int | None = None) -> Mesh:
    """A mesh with one axis, ``"expert"``, over the first ``count`` devices; ``None``: over a power of two of them,
    eight at most.

    **Raises** ``SettingsError`` if there are fewer.
    """
    found = jax.devices()
    if count is None:
        count = 1 << min(len(found), _MOST).bit_length() - 1
    if len(found) < count:
        fix = (
            f"set XLA_FLAGS=--{_FLAG}={count} before JAX starts"
            if found[0].platform == "cpu"
            else f"ask for at most {len(found)}, or set JAX_PLATFORMS=cpu for virtual devices"
        )
        raise SettingsError(f"{count} devices were asked for and JAX has {len(found)} ({found[0].platform}): {fix}.")
    return jax.make_mesh((count,), ("expert",), devices=found[:count], axis_types=(AxisType.Auto,))
