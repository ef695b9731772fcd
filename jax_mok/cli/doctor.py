"""``doctor``: what this machine can run, and why not the rest."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import platformdirs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import jax_mok as mok
from jax_mok import backends, runtime
from jax_mok._call import Call
from jax_mok.backends import ffi
from jax_mok.cli import extras
from jax_mok.runtime import cuda, sharing

OLDEST_JAX, NEWEST_JAX = (0, 10, 2), (0, 12, 0, 1)

_BACKENDS = {
    "cpu": "fused kernel on CPU devices",
    "cuda": "fused kernel on NVIDIA GPUs",
    "xla": "ragged_dot and XLA's collectives",
    "reference": "the dense definition, for tests",
}
_SMALL = Call(
    tokens=8,
    hidden=128,
    inter=128,
    shared_inter=0,
    experts=8,
    top_k=2,
    ranks=1,
    dtype="bfloat16",
    weight_dtype="bfloat16",
    axis=None,
    config=mok.MoEConfig(),
)


class Finding(NamedTuple):
    """``good``: yes, no, or ``None`` for a plain fact."""

    name: str
    good: bool | None
    detail: str


def examine(console: Console | None = None) -> bool:
    """Prints the findings; returns whether the layer runs natively on JAX's default devices."""
    why_not = native_refusal()
    table = Table("", "", "", title=f"jax_mok {mok.__version__}", show_header=False)
    for section in (_software(), _devices(), _backends(), _packages(), _caches()):
        for name, good, detail in section:
            mark = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[good]
            table.add_row(name, mark, escape(detail))
        table.add_section()
    platform = backends.platform_of(None)
    if why_not is None:
        verdict = f"[green]The layer runs natively here[/], with backend {platform!r}."
    else:
        verdict = f"[yellow]The layer runs here with backend 'xla' only[/]: {escape(why_not)}."
    console = console or Console()
    console.print(table)
    console.print(verdict)
    return why_not is None


def native_refusal() -> str | None:
    """Why the native backend of JAX's default devices cannot run, or ``None``."""
    platform = backends.platform_of(None)
    if platform not in backends.NATIVE:
        return f"there is no kernel for platform {platform!r}"
    return ffi.refusal(_SMALL, platform, platform)


def _software() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", sys.version_info >= (3, 11), f"{python} (3.11 or newer)")
    supported = ".".join(map(str, OLDEST_JAX)) + " .. " + ".".join(map(str, NEWEST_JAX))
    for name, version in (("jax", jax.__version__), ("jaxlib", extras.version("jaxlib") or "unknown")):
        parts = tuple(int(p) for p in version.split(".") if p.isdigit())
        note = " (newer than any tested)" if parts > NEWEST_JAX else ""
        yield Finding(name, OLDEST_JAX <= parts <= NEWEST_JAX, f"{version}{note}; supported: {supported}")
    why = runtime.load_error()
    yield Finding("native module", why is None, why or f"instruction set {runtime.native().isa()}")


def _devices() -> Iterator[Finding]:
    kinds = collections.Counter((d.platform, d.device_kind) for d in jax.devices())
    for (platform, kind), count in kinds.items():
        yield Finding("devices", None, f"{count} x {kind} ({platform})")
    yield Finding("processes", None, f"{jax.process_count()}, {os.cpu_count()} CPU cores in this one's host")
    if backends.platform_of(None) == "cuda":
        yield from _links()
        if runtime.load_error() is None:
            yield from _sharing()


def _links() -> Iterator[Finding]:
    """How the GPUs of this host reach each other; ranks read their peers' memory."""
    try:
        unlinked = cuda.unlinked()
    except ImportError:
        yield Finding("peer access", None, "not examined: needs pip install 'jax_mok[cuda]'")
        return
    except RuntimeError as error:
        yield Finding("peer access", False, str(error))
        return
    count = len(cuda.devices())
    if (pairs := count * (count - 1)) > 0:
        yield Finding("peer access", not unlinked, f"{pairs - len(unlinked)} of {pairs} pairs of local GPUs")


def _sharing() -> Iterator[Finding]:
    """In which ways processes can share memory of their GPUs, tried on the first one."""
    reach = {sharing.FILES: "between processes of a host", sharing.FABRIC: "between processes, also of several hosts"}
    for way, where in reach.items():
        why = runtime.native().cuda_sharing_refusal(jax.local_devices()[0].local_hardware_id, way)
        yield Finding(f"GPU memory by {way}", not why, where if not why else f"not {where}: {why}")


def _backends() -> Iterator[Finding]:
    platforms = {backends.platform_of(None), "cpu"}  # JAX always has CPU devices beside the default ones
    for name, what in _BACKENDS.items():
        why = None
        if name in backends.NATIVE:
            why = ffi.refusal(_SMALL, name, name) if name in platforms else f"JAX has no {name} devices here"
        yield Finding(f"backend {name!r}", why is None, what if why is None else f"{what}; {why}")


def _packages() -> Iterator[Finding]:
    # Of two extras with the same package, the smaller one, which comes first.
    smallest = {package: extra for extra, packages in reversed(extras.EXTRAS.items()) for package in packages}
    for package, extra in reversed(smallest.items()):
        version = extras.version(package)
        yield Finding(package, version is not None, version or f"pip install 'jax_mok[{extra}]'")


def _caches() -> Iterator[Finding]:
    path = platformdirs.user_cache_path("jax_mok")
    parent = next(p for p in (path, *path.parents) if p.exists())
    writable = os.access(parent, os.W_OK)
    state = "exists" if path.exists() else "not there yet"
    yield Finding("cache directory", writable, f"{path} ({state}{'' if writable else ', not writable'})")
