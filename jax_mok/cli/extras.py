"""Optional packages, and the extra that brings each. As in pyproject.toml, which a test compares."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Final

EXTRAS: Final = {
    "flax": ("flax",),
    "equinox": ("equinox",),
    "cli": ("typer", "rich", "platformdirs"),
    "bench": ("matplotlib", "optax"),
    "demo": ("optax", "orbax-checkpoint", "matplotlib"),
    "cuda": ("cuda-core", "nvidia-cuda-nvrtc", "platformdirs"),
}
_INCLUDES: Final = {"demo": ("cli", "flax", "equinox"), "bench": ("cli",)}


@functools.cache
def version(package: str) -> str | None:
    """The installed version, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    names = [*EXTRAS[extra], *(name for other in _INCLUDES.get(extra, ()) for name in EXTRAS[other])]
    return [name for name in names if version(name) is None]
