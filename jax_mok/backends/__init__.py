"""Which backend runs a call. Each is tried in order and says why it refuses."""

from __future__ import annotations

from typing import Any

import jax

from jax_mok._call import Call
from jax_mok._say import say_once
from jax_mok.backends import ffi

NATIVE = ("cpu", "cuda")


def platform_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None) -> str:
    """The platform ("cpu", "cuda", ...) that a call on this mesh will run on."""
    device: Any = None if mesh is None else getattr(mesh.abstract_mesh, "abstract_device", None)
    if device is None:
        device = getattr(jax.config, "jax_default_device")  # noqa: B009 (set at run time)
    platform = getattr(device, "platform", device) or jax.default_backend()
    return "cuda" if platform == "gpu" else str(platform)


def select(call: Call, platform: str) -> str:
    """The backend for this call: the one asked for, or with "auto" the best that fits."""
    asked = call.config.backend
    if asked in ("xla", "reference"):
        return asked
    if asked == "auto":
        why = f"no kernel for platform {platform!r}"
        if platform in NATIVE:
            why = ffi.refusal(call, platform, platform) or ffi.reservation(call, platform)
        if why is None:
            return platform
        say_once(f"jax_mok: {why}; running this layer with backend='xla'.")
        return "xla"
    why = ffi.refusal(call, asked, platform)
    if why is not None:
        raise NotImplementedError(f"MoEConfig(backend={asked!r}): {why}. Use backend='auto' or backend='xla'.")
    return asked
