"""``bench``: programs that compute the same thing, timed against each other in one run.

A contender is a name and a function with the arguments of ``mok.moe``; another baseline is one more of them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import jax_mok as mok
from jax_mok import backends
from jax_mok.cli import baselines, extras, timing, torch_baseline
from jax_mok.cli.doctor import native_refusal
from jax_mok.cli.shape import Arrays, Shape
from jax_mok.cli.timing import Program
from jax_mok.demo import devices
from jax_mok.demo.settings import SettingsError

Pass = Literal["fwd", "fwd+bwd"]
_FLOP_OF_FORWARD = {"fwd": 1, "fwd+bwd": 3}
_MATMUL = "matmul"
_GPU_BLOCK_SECONDS = 0.5

# Of the same sums in another order. In bfloat16 a result that falls on the other side of a rounding boundary is off by
# 2^-8 of itself, in float32 by 2^-24; a GPU's default float32 matmul (TensorFloat-32) rounds its factors to 2^-11.
_TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
_TOLERANCE_TF32 = 5e-3


@dataclasses.dataclass(frozen=True)
class Contender:
    """``layer(x, expert_ids, router_weights, experts) -> y`` on the global arrays of the mesh, to be compiled by JAX;
    ``None`` for the baseline that JAX does not run. A baseline may fail, our own backends may not."""

    name: str
    layer: Callable[..., jax.Array] | None
    baseline: bool = False


@dataclasses.dataclass(frozen=True)
class Selection:
    """What to time, ours first, and why not the rest."""

    contenders: list[Contender]
    not_timed: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One program's calls: median, and the 10th and 90th percentile, over blocks; the rate counts only the FLOP of the
    routed experts' matmuls. ``speedup`` is over the fastest of the others than the first contender."""

    contender: str
    of: Pass
    median_ms: float
    p10_ms: float
    p90_ms: float
    gflops: float
    percent_of_matmul: float
    speedup: float | None
    sm_mhz: float | None


@dataclasses.dataclass(frozen=True)
class Failure:
    contender: str
    of: Pass
    reason: str
    baseline: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """``busiest_rank``: rows of the rank with most, as a multiple of the balanced load.
    ``differences``: for each contender after the first and each array, the relative L2 distance from the first's.
    ``best_of_others``: by pass, the contender that ``Timing.speedup`` refers to."""

    environment: dict[str, Any]
    shape: Shape
    busiest_rank: float
    residuals: str
    rounds: int
    block_seconds: float
    seed: int
    matmul: str
    matmul_gflops: float
    matmul_sm_mhz: float | None
    baselines: list[str]
    differences: dict[str, dict[str, float]]
    tolerance: float
    best_of_others: dict[str, str]
    timings: list[Timing]
    failures: list[Failure]
    not_timed: dict[str, str]

    @property
    def odd(self) -> list[str]:
        """Contenders whose results are not the first's."""
        # Not "any larger": a NaN must count.
        exact = {name for name, found in self.differences.items() if all(d <= self.tolerance for d in found.values())}
        return [name for name in self.differences if name not in exact]

    @property
    def agrees(self) -> bool:
        """No result is odd, or only those of baselines that another baseline contradicts."""
        others = set(self.baselines).intersection(self.differences)
        return not self.odd or (set(self.odd) <= others and others > set(self.odd))

    @property
    def good(self) -> bool:
        """The results agree and none of our own backends failed."""
        return self.agrees and all(f.baseline for f in self.failures)


def mesh_for(shape: Shape) -> Mesh:
    devices.request(shape.ranks)
    return devices.expert_mesh(shape.ranks)


def select(mesh: Mesh, own: list[str] | None, others: list[str] | None, residuals: Any) -> Selection:
    """Our backends by name, and baselines. Without any names: the native backend against all that can run here."""
    everything = own is None and others is None
    if own is None:
        why = native_refusal()
        if why is not None:
            raise SettingsError(f"There is no native backend to time here: {why}. Name backends with --backend.")
        native = backends.platform_of(mesh)
        # The dense definition of the layer is worth timing only where its E / K times the work stays small.
        own = [native, "reference", "xla"] if everything and native == "cpu" else [native]
    if everything:
        moved = "local/" if mesh.size == 1 else ("all_gather/", "all_to_all/")
        others = [*(name for name in baselines.NAMES if name.startswith(moved)), torch_baseline.NAME]
    not_timed = {name: why for name in others or () if (why := _refusal(name, mesh)) is not None}
    if everything and mesh.size == 1 and "xla" in own:
        not_timed["local/xla"] = "the same program as backend xla"
    rivals = [name for name in others or () if name not in not_timed]
    return Selection([*(_ours(name, mesh, residuals) for name in own), *(_rival(n, mesh) for n in rivals)], not_timed)


def _refusal(name: str, mesh: Mesh) -> str | None:
    return torch_baseline.refusal(mesh) if name == torch_baseline.NAME else baselines.refusal(name, mesh)


def _ours(name: Any, mesh: Mesh, residuals: Any) -> Contender:
    config = mok.MoEConfig(backend=name, residuals=residuals)
    return Contender(name, functools.partial(mok.moe, mesh=mesh, config=config))


def _rival(name: str, mesh: Mesh) -> Contender:
    return Contender(name, None if name == torch_baseline.NAME else baselines.layer(name, mesh), baseline=True)


def default_block_seconds(mesh: Mesh) -> float:
    """A GPU needs time to reach the clock that its power allows; one call on a CPU is long enough."""
    return 0.0 if backends.platform_of(mesh) == "cpu" else _GPU_BLOCK_SECONDS


def run(
    shape: Shape, mesh: Mesh, selection: Selection, passes: list[Pass], plan: timing.Plan, residuals: str, output: Path
) -> Result:
    """Checks the contenders against each other, times them, prints a table, and writes ``bench.json`` and
    ``bench.png``."""
    console = Console()
    arrays = shape.random(mesh, plan.seed)
    selection = _without_overflow(selection, mesh, arrays, shape)
    with console.status("compiling and comparing"):
        programs, differences, failed = _compile_and_compare(selection.contenders, passes, arrays)
    matmul = timing.matmul(mesh, plan.seed)
    samples, failed_later = timing.time_programs({**programs, _MATMUL: matmul.program}, plan, mesh)
    baseline = {c.name: c.baseline for c in selection.contenders}
    of_matmul = samples.pop(_MATMUL)
    matmul_rate = matmul.flop / float(np.median(of_matmul.seconds))
    first = selection.contenders[0].name
    timings, best = _timings(samples, passes, first, shape.forward_flop, matmul_rate)
    result = Result(
        environment=environment(mesh),
        shape=shape,
        busiest_rank=_busiest_rank(shape, arrays.expert_ids),
        residuals=residuals,
        rounds=len(of_matmul.seconds),
        block_seconds=plan.block_seconds,
        seed=plan.seed,
        matmul=matmul.name,
        matmul_gflops=matmul_rate / 1e9,
        matmul_sm_mhz=of_matmul.median_mhz(),
        baselines=[name for name, is_baseline in baseline.items() if is_baseline],
        differences=differences,
        tolerance=tolerance(shape, mesh),
        best_of_others=best,
        timings=timings,
        failures=[Failure(name, of, why, baseline[name]) for (name, of), why in {**failed, **failed_later}.items()],
        not_timed=selection.not_timed,
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / "bench.json").write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    _draw(result, passes, output / "bench.png")
    _show(result, first, passes, console)
    console.print(f"{output}: bench.json, bench.png")
    return result


def _busiest_rank(shape: Shape, expert_ids: jax.Array) -> float:
    rows = np.bincount(np.asarray(expert_ids).ravel() // (shape.experts // shape.ranks), minlength=shape.ranks)
    return float(rows.max() / rows.mean())


def tolerance(shape: Shape, mesh: Mesh) -> float:
    if shape.dtype == "float32" and backends.platform_of(mesh) != "cpu":
        return _TOLERANCE_TF32
    return _TOLERANCE[shape.dtype]


def _without_overflow(selection: Selection, mesh: Mesh, arrays: Arrays, shape: Shape) -> Selection:
    """Without the baselines that would have to drop rows of these arrays."""
    why = baselines.overflow(mesh, arrays.expert_ids, shape.experts)
    if why is None:
        return selection
    dropped = {c.name: why for c in selection.contenders if c.baseline and c.name != torch_baseline.NAME}
    kept = [c for c in selection.contenders if c.name not in dropped]
    return Selection(kept, {**selection.not_timed, **dropped})


def _compile_and_compare(
    contenders: list[Contender], passes: list[Pass], arrays: Arrays
) -> tuple[dict[Any, Program], dict[str, dict[str, float]], dict[Any, str]]:
    """Programs by (name, pass); distances of their results from the first contender's; reasons of those that failed.
    Results of one contender beside the first are in memory at a time."""
    programs, failed, differences = {}, {}, collections.defaultdict(dict)
    for of in passes:
        expected: dict[str, jax.Array] = {}
        for contender in contenders:
            try:
                program = _program(contender, of, arrays)
                found = _named(program.to_jax(program.call()))
                jax.block_until_ready(found)
            except Exception as error:
                failed[contender.name, of] = timing.reason(error)
                continue
            programs[contender.name, of] = program
            if contender is contenders[0]:
                expected = found
                continue
            known = differences[contender.name]
            for name in expected:
                distance = float(_relative_l2(found[name], expected[name]))
                known[name] = float(np.maximum(known.get(name, 0.0), distance))  # NaN wins
    return programs, dict(differences), failed


def _program(contender: Contender, of: Pass, a: Arrays) -> Program:
    layer = contender.layer
    if layer is None:
        return torch_baseline.program(a, backward=of == "fwd+bwd")

    def both(x: jax.Array, ids: jax.Array, router_weights: jax.Array, experts: mok.Experts, dy: jax.Array) -> Any:
        def with_ids(x: jax.Array, router_weights: jax.Array, experts: mok.Experts) -> jax.Array:
            return layer(x, ids, router_weights, experts)

        y, pullback = jax.vjp(with_ids, x, router_weights, experts)
        return y, *pullback(dy)

    if of == "fwd":
        return Program(functools.partial(jax.jit(layer), a.x, a.expert_ids, a.router_weights, a.experts))
    return Program(functools.partial(jax.jit(both), a.x, a.expert_ids, a.router_weights, a.experts, a.dy))


def _named(result: Any) -> dict[str, jax.Array]:
    if not isinstance(result, tuple):
        return {"y": result}
    y, dx, dw, experts = result
    return {"y": y, "dx": dx, "d_router_weights": dw} | {f"d_{k}": value for k, value in experts._asdict().items()}


@jax.jit
def _relative_l2(a: jax.Array, b: jax.Array) -> jax.Array:
    """On the devices, in float32, fused: no copies of arrays that may be gigabytes. The norm of row norms, because a
    long float32 sum stops growing."""

    def norm(v: jax.Array) -> jax.Array:
        return jnp.linalg.norm(jnp.linalg.norm(v, axis=-1))

    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return norm(a - b) / jnp.maximum(norm(b), jnp.finfo(jnp.float32).tiny)


def _timings(
    samples: dict[Any, timing.Samples], passes: list[Pass], first: str, forward_flop: int, matmul_rate: float
) -> tuple[list[Timing], dict[str, str]]:
    """A row per program in the order given, and by pass the fastest contender after the first."""
    timings, best = [], {}
    for of in passes:
        medians = {name: found.percentiles_ms()[1] for (name, its), found in samples.items() if its == of}
        others = {name: ms for name, ms in medians.items() if name != first}
        if others:
            best[of] = min(others, key=others.__getitem__)
        for name, ms in medians.items():
            p10, _, p90 = samples[name, of].percentiles_ms()
            rate = _FLOP_OF_FORWARD[of] * forward_flop / (1e-3 * ms)
            speedup = others[best[of]] / ms if others else None
            mhz = samples[name, of].median_mhz()
            timings.append(Timing(name, of, ms, p10, p90, rate / 1e9, 100 * rate / matmul_rate, speedup, mhz))
    return timings, best


def environment(mesh: Mesh) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    rivals = {name: version for name in ("tokamax", "torch") if (version := extras.version(name)) is not None}
    return {
        "jax_mok": mok.__version__,
        "jax": jax.__version__,
        **rivals,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "devices": f"{mesh.size} x {device.device_kind} ({device.platform})",
    }


def _show(result: Result, first: str, passes: list[Pass], console: Console) -> None:
    s = result.shape
    title = f"T {s.tokens}  H {s.hidden}  I {s.inter}  E {s.experts}  K {s.top_k}  {s.dtype}  on {s.ranks} devices"
    per, unit = (1e3, "TFLOP/s") if result.matmul_gflops >= 1e3 else (1, "GFLOP/s")
    table = Table(title=title)
    table.add_column("pass", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    for column in ("ms", "10-90 %", unit, "% of matmul", "vs best other"):
        table.add_column(column, justify="right", no_wrap=column == "10-90 %")
    for of in passes:
        for t in (t for t in result.timings if t.of == of):
            table.add_row(
                of,
                t.contender,
                ms(t.median_ms),
                f"{ms(t.p10_ms)}-{ms(t.p90_ms)}",
                f"{t.gflops / per:.1f}",
                f"{t.percent_of_matmul:.0f}",
                "" if t.speedup is None else f"x {t.speedup:.2f}",
            )
        for f in (f for f in result.failures if f.of == of):
            table.add_row(of, f.contender, "failed", style="red")
        table.add_section()
    console.print(table)
    blocks = f"blocks of about {result.block_seconds:g} s" if result.block_seconds else "calls"
    clock = f", {result.matmul_sm_mhz:.0f} MHz" if result.matmul_sm_mhz else ""
    console.print(
        f"Medians of {result.rounds} {blocks} in random order. Matmul in the same run: {result.matmul} at "
        f"{result.matmul_gflops / per:.1f} {unit}{clock}."
    )
    if s.ranks > 1:
        console.print(f"The busiest rank has x {result.busiest_rank:.2f} of the balanced rows.")
    if result.best_of_others:
        best = ", ".join(f"{name} ({of})" for of, name in result.best_of_others.items())
        console.print(f"Best of the others than {first}: {best}.")
    for name, found in result.differences.items():
        if found:
            worst = max(found, key=lambda key: (np.isnan(found[key]), found[key]))
            console.print(f"{name} against {first}: relative L2 of {found[worst]:.1e} at most ({worst}).")
    show_exceptions(console, {f"{f.contender} {f.of}": f.reason for f in result.failures}, result.not_timed)
    if not result.agrees:
        console.print(f"[bold red]FAILED[/]: the results differ by more than {result.tolerance:.0e}.")
    elif result.odd:
        console.print(
            f"[yellow]Inaccurate[/]: {', '.join(result.odd)}, by more than {result.tolerance:.0e}; the other baselines "
            f"agree with {first}."
        )


def show_exceptions(console: Console, failed: dict[str, str], not_timed: dict[str, str]) -> None:
    """What is not in the table, and why."""
    for name, why in failed.items():
        console.print(f"[red]{name} failed[/]: {escape(why)}")
    for name, why in not_timed.items():
        console.print(f"{name} not timed: {escape(why)}.")


def ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _draw(result: Result, passes: list[Pass], path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(t.contender for t in result.timings))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        rows = [t for t in result.timings if t.contender == name]
        places = [passes.index(t.of) + (i - (len(names) - 1) / 2) * width for t in rows]
        bars = axes.bar(places, [t.median_ms for t in rows], width, label=name)
        axes.bar_label(bars, fmt="%.1f")
    s = result.shape
    axes.set_xticks(np.arange(len(passes)), passes)
    axes.set(
        yscale="log",
        ylabel="ms (median)",
        title=f"T {s.tokens}, H {s.hidden}, I {s.inter}, E {s.experts}, K {s.top_k}, {s.dtype}",
    )
    if names:
        axes.legend(title="contender")
    figure.savefig(path, dpi=120)
