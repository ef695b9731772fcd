"""``bench``: programs that compute the same thing, timed against each other in one run.

A contender is a name and a function with the arguments of ``mok.moe``; another baseline is one more of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_mok as mok
from jax_mok import backends
from jax_mok.cli.doctor import native_refusal
from jax_mok.cli.shape import Arrays, Shape
from jax_mok.demo import devices
from jax_mok.demo.settings import SettingsError

Pass = Literal["fwd", "fwd+bwd"]
_PASSES: tuple[Pass, ...] = ("fwd", "fwd+bwd")
_FLOP_OF_FORWARD = {"fwd": 1, "fwd+bwd": 3}
_MATMUL = "matmul"
_WARM_CALLS = 2
_LEAST_ROUNDS = 5

# Of the same sums in another order. In bfloat16 a result that falls on the other side of a rounding boundary is off by
# 2^-8 of itself, in float32 by 2^-24.
_TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}


@dataclasses.dataclass(frozen=True)
class Contender:
    """``layer(x, expert_ids, router_weights, experts) -> y`` on the global arrays of the mesh."""

    name: str
    layer: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One program's calls: median, and the 10th and 90th percentile; the rate counts only the FLOP of the routed
    experts' matmuls."""

    contender: str
    of: Pass
    median_ms: float
    p10_ms: float
    p90_ms: float
    gflops: float
    percent_of_matmul: float


@dataclasses.dataclass(frozen=True)
class Result:
    """``differences``: for each contender after the first and each array, the relative L2 distance from the first's."""

    environment: dict[str, Any]
    shape: Shape
    residuals: str
    rounds: int
    seed: int
    matmul: str
    matmul_gflops: float
    differences: dict[str, dict[str, float]]
    tolerance: float
    timings: list[Timing]

    @property
    def agrees(self) -> bool:
        # Not "any larger": a NaN must fail.
        return all(d <= self.tolerance for found in self.differences.values() for d in found.values())


def contenders(mesh: Mesh, names: list[str], residuals: Any) -> list[Contender]:
    """Our own backends."""

    def ours(name: Any) -> Contender:
        config = mok.MoEConfig(backend=name, residuals=residuals)
        return Contender(name, functools.partial(mok.moe, mesh=mesh, config=config))

    return [ours(name) for name in names]


def run(
    shape: Shape, names: list[str] | None, *, residuals: str, rounds: int, max_seconds: float, seed: int, output: Path
) -> Result:
    """Checks the contenders against each other, times them, prints a table, and writes ``bench.json`` and
    ``bench.png``."""
    console = Console()
    devices.request(shape.ranks)
    mesh = devices.expert_mesh(shape.ranks)
    if names is None:
        why = native_refusal()
        if why is not None:
            raise SettingsError(f"There is no native backend to time here: {why}. Name backends with --backend.")
        native = backends.platform_of(mesh)
        # The dense definition of the layer is a baseline only where its E / K times the work stays small.
        names = ["cpu", "reference", "xla"] if native == "cpu" else [native, "xla"]
    rivals = contenders(mesh, names, residuals)
    arrays = shape.random(mesh, seed)

    with console.status("compiling and comparing"):
        programs = {(c.name, of): _program(c, of) for c in rivals for of in _PASSES}
        results = {c.name: _named(programs[c.name, "fwd+bwd"](arrays)) for c in rivals}
        first = results[rivals[0].name]
        differences = {
            c.name: {name: _relative_l2(value, first[name]) for name, value in results[c.name].items()}
            for c in rivals[1:]
        }
    matmul, matmul_flop = _matmul(mesh, seed)
    timed: dict[Any, Callable[[], Any]] = {key: functools.partial(p, arrays) for key, p in programs.items()}
    seconds = _time({**timed, _MATMUL: matmul}, rounds, max_seconds, seed)

    matmul_seconds = seconds.pop(_MATMUL)
    matmul_rate = matmul_flop / float(np.median(matmul_seconds))
    timings = []
    for (name, of), found in seconds.items():
        p10, median, p90 = np.percentile(found, (10, 50, 90))
        rate = _FLOP_OF_FORWARD[of] * shape.forward_flop / median
        timings.append(Timing(name, of, 1e3 * median, 1e3 * p10, 1e3 * p90, rate / 1e9, 100 * rate / matmul_rate))
    result = Result(
        environment=_environment(mesh),
        shape=shape,
        residuals=residuals,
        rounds=len(matmul_seconds),
        seed=seed,
        matmul=f"{_matmul_dtype(mesh)} {_matmul_size(mesh)}^3",
        matmul_gflops=matmul_rate / 1e9,
        differences=differences,
        tolerance=_TOLERANCE[shape.dtype],
        timings=timings,
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / "bench.json").write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    _draw(result, output / "bench.png")
    _show(result, console)
    console.print(f"{output}: bench.json, bench.png")
    return result


def _program(contender: Contender, of: Pass) -> Callable[[Arrays], Any]:
    def forward(a: Arrays) -> jax.Array:
        return contender.layer(a.x, a.expert_ids, a.router_weights, a.experts)

    def both(a: Arrays) -> Any:
        def layer(x: jax.Array, router_weights: jax.Array, experts: mok.Experts) -> jax.Array:
            return contender.layer(x, a.expert_ids, router_weights, experts)

        y, pullback = jax.vjp(layer, a.x, a.router_weights, a.experts)
        return y, *pullback(a.dy)

    return jax.jit(forward if of == "fwd" else both)


def _named(results: Any) -> dict[str, np.ndarray]:
    y, dx, dw, experts = jax.device_get(results)
    named = {"y": y, "dx": dx, "d_router_weights": dw}
    named |= {f"d_{name}": value for name, value in experts._asdict().items()}
    return {name: np.asarray(value, np.float64) for name, value in named.items()}


def _relative_l2(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float64).tiny))


def _time(programs: dict[Any, Callable[[], Any]], rounds: int, max_seconds: float, seed: int) -> dict[Any, list[float]]:
    """Seconds per call. Each round calls every program once, in a new random order, so that drift of the machine's
    clock or load falls on all of them alike."""
    for program in programs.values():
        for _ in range(_WARM_CALLS):
            jax.block_until_ready(program())
    order, shuffle = list(programs), random.Random(seed)
    seconds: dict[Any, list[float]] = {key: [] for key in programs}
    began = time.perf_counter()
    for done in track(range(rounds), "timing", transient=True):
        if done >= _LEAST_ROUNDS and time.perf_counter() - began > max_seconds:
            break
        shuffle.shuffle(order)
        for key in order:
            start = time.perf_counter()
            jax.block_until_ready(programs[key]())
            seconds[key].append(time.perf_counter() - start)
    return seconds


def _matmul_dtype(mesh: Mesh) -> str:
    # What the kernels multiply in: float32 vectors on a CPU, bfloat16 tensor cores on a GPU.
    return "float32" if backends.platform_of(mesh) == "cpu" else "bfloat16"


def _matmul_size(mesh: Mesh) -> int:
    return 1536 if backends.platform_of(mesh) == "cpu" else 8192  # enough to fill the device


def _matmul(mesh: Mesh, seed: int) -> tuple[Callable[[], jax.Array], int]:
    """A dense matmul for scale: on one virtual CPU device, which has all cores; on every GPU."""
    copies = 1 if backends.platform_of(mesh) == "cpu" else mesh.size
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    size = _matmul_size(mesh)
    a = jax.random.normal(jax.random.key(seed), (copies, size, size), jnp.dtype(_matmul_dtype(mesh)))
    a = jax.device_put(a, mesh.devices.flat[0] if copies == 1 else sharding)
    program = jax.jit(lambda a: jnp.matmul(a, a.mT))
    return functools.partial(program, a), 2 * copies * size**3


def _environment(mesh: Mesh) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "jax_mok": mok.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "devices": f"{mesh.size} x {device.device_kind} ({device.platform})",
    }


def _show(result: Result, console: Console) -> None:
    s = result.shape
    title = f"T {s.tokens}  H {s.hidden}  I {s.inter}  E {s.experts}  K {s.top_k}  {s.dtype}  on {s.ranks} devices"
    table = Table(title=title)
    table.add_column("pass")
    table.add_column("backend")
    for column in ("ms", "10-90 %", "GFLOP/s", "% of matmul", f"vs {result.timings[-1].contender}"):
        table.add_column(column, justify="right", no_wrap=True)
    for of in _PASSES:
        rows = [t for t in result.timings if t.of == of]
        for t in rows:
            table.add_row(
                of,
                t.contender,
                _ms(t.median_ms),
                f"{_ms(t.p10_ms)}-{_ms(t.p90_ms)}",
                f"{t.gflops:.1f}",
                f"{t.percent_of_matmul:.0f}",
                f"x {rows[-1].median_ms / t.median_ms:.2f}",
            )
        table.add_section()
    console.print(table)
    console.print(
        f"Medians of {result.rounds} calls in random order. Matmul in the same run: {result.matmul} at "
        f"{result.matmul_gflops:.1f} GFLOP/s."
    )
    first = result.timings[0].contender
    for name, found in result.differences.items():
        worst = max(found, key=lambda key: (np.isnan(found[key]), found[key]))
        console.print(f"{name} against {first}: relative L2 of {found[worst]:.1e} at most ({worst}).")
    if not result.agrees:
        console.print(f"[bold red]FAILED[/]: the results differ by more than {result.tolerance:.0e}.")


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _draw(result: Result, path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(t.contender for t in result.timings))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        rows = {t.of: t for t in result.timings if t.contender == name}
        places = np.arange(len(_PASSES)) + (i - (len(names) - 1) / 2) * width
        bars = axes.bar(places, [rows[of].median_ms for of in _PASSES], width, label=name)
        axes.bar_label(bars, fmt="%.1f")
    s = result.shape
    axes.set_xticks(np.arange(len(_PASSES)), _PASSES)
    axes.set(
        yscale="log",
        ylabel="ms (median)",
        title=f"T {s.tokens}, H {s.hidden}, I {s.inter}, E {s.experts}, K {s.top_k}, {s.dtype}",
    )
    axes.legend(title="backend")
    figure.savefig(path, dpi=120)
