"""``bench --train``: a training step of two decoder layers, with our MoE layer and with the baselines in its place.

    x [B, S, H] -> x + attention(norm(x)) -> x + moe(norm(x)), twice; mean squared error to a target; AdamW

Parameters and the optimizer's state are float32; layers compute in the dtype of the bench. The MoE's tokens, B * S, are
the bench's T. Every program takes the same step from the same state, again and again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jax_mok as mok
from jax_mok import backends
from jax_mok.cli import bench, timing
from jax_mok.cli.shape import Shape
from jax_mok.cli.timing import Program
from jax_mok.router import softmax_topk

_LAYERS = 2
_LONGEST_SEQUENCE = 2048
_HEAD = 128
_OPTIMIZER = optax.adamw(1e-4, weight_decay=0.01)

# Of the loss and the norm of the gradient: a token on the border between two experts goes to either, by rounding.
_TOLERANCE = 2e-2


class Layer(NamedTuple):
    """Parameters of one decoder layer: ``attention_norm``, ``moe_norm [H]``, ``qkv [H, 3H]``, ``out [H, H]``,
    ``router [H, E]`` and the experts."""

    attention_norm: Any
    qkv: Any
    out: Any
    moe_norm: Any
    router: Any
    experts: mok.Experts


class State(NamedTuple):
    layers: list[Layer]
    optimizer: Any


class Outcome(NamedTuple):
    """Of one step: the scalars that tell whether two programs did the same."""

    loss: Any
    gradient_norm: Any


@dataclasses.dataclass(frozen=True)
class StepTiming:
    contender: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    tokens_per_s: float
    speedup: float | None
    sm_mhz: float | None


@dataclasses.dataclass(frozen=True)
class Result:
    """``speedup`` of a timing is over ``best_of_others``, the fastest contender after the first."""

    environment: dict[str, Any]
    shape: Shape
    layers: int
    sequence: int
    heads: int
    rounds: int
    block_seconds: float
    outcomes: dict[str, Outcome]
    tolerance: float
    best_of_others: str | None
    timings: list[StepTiming]
    failures: list[bench.Failure]
    not_timed: dict[str, str]

    @property
    def agrees(self) -> bool:
        first, *rest = self.outcomes.values() if self.outcomes else [Outcome(0.0, 0.0)]
        finite = all(map(math.isfinite, first))
        return finite and all(
            abs(a - b) <= self.tolerance * abs(b) for other in rest for a, b in zip(other, first, strict=True)
        )

    @property
    def good(self) -> bool:
        """The steps agree and none of our own backends failed."""
        return self.agrees and all(f.baseline for f in self.failures)


def run(shape: Shape, mesh: Mesh, selection: bench.Selection, plan: timing.Plan, output: Path) -> Result:
    """Compares the steps, times them, prints a table and writes ``train.json``."""
    console = Console()
    sequence = math.gcd(shape.tokens // shape.ranks, _LONGEST_SEQUENCE)
    contenders = [c for c in selection.contenders if c.layer is not None]
    not_jax = {c.name: "not a JAX program" for c in selection.contenders if c.layer is None}
    state, x, target = _inputs(shape, mesh, sequence, plan.seed)
    programs, outcomes, failed = {}, {}, {}
    with console.status("compiling and comparing"):
        for contender in contenders:
            assert contender.layer is not None
            step = jax.jit(functools.partial(_step, contender.layer, shape.top_k, _attention(shape, mesh)))
            program = Program(functools.partial(step, state, x, target))
            try:
                outcomes[contender.name] = Outcome(*map(float, program.call()[1]))
            except Exception as error:
                failed[contender.name] = timing.reason(error)
                continue
            programs[contender.name] = program
    samples, failed_later = timing.time_programs(programs, plan, mesh)
    baseline = {c.name: c.baseline for c in contenders}
    timings, best = _timings(samples, contenders[0].name, shape.tokens)
    result = Result(
        environment=bench.environment(mesh),
        shape=shape,
        layers=_LAYERS,
        sequence=sequence,
        heads=_heads(shape.hidden),
        rounds=max((len(s.seconds) for s in samples.values()), default=0),
        block_seconds=plan.block_seconds,
        outcomes=outcomes,
        tolerance=_TOLERANCE,
        best_of_others=best,
        timings=timings,
        failures=[bench.Failure(n, "fwd+bwd", why, baseline[n]) for n, why in {**failed, **failed_later}.items()],
        not_timed={**selection.not_timed, **not_jax},
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / "train.json").write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    _show(result, contenders[0].name, console)
    console.print(f"{output}: train.json")
    return result


def _heads(hidden: int) -> int:
    return hidden // _HEAD if hidden % _HEAD == 0 else 1


def _inputs(shape: Shape, mesh: Mesh, sequence: int, seed: int) -> tuple[State, jax.Array, jax.Array]:
    """State, input and target on the mesh: experts and sequences are spread over it, all else is replicated."""
    H, I, E = shape.hidden, shape.inter, shape.experts
    replicated, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("expert"))

    def normal(key: jax.Array, *dims: int) -> jax.Array:
        return dims[-2] ** -0.5 * jax.random.normal(key, dims, jnp.float32)

    def layer(key: jax.Array) -> Layer:
        keys, ones = jax.random.split(key, 6), jnp.ones(H)
        experts = mok.Experts(normal(keys[3], E, H, I), normal(keys[4], E, H, I), normal(keys[5], E, I, H))
        return Layer(ones, normal(keys[0], H, 3 * H), normal(keys[1], H, H), ones, normal(keys[2], H, E), experts)

    def init(key: jax.Array) -> State:
        layers = [layer(k) for k in jax.random.split(key, _LAYERS)]
        return State(layers, _OPTIMIZER.init(layers))

    keys = jax.random.split(jax.random.key(seed), 3)
    shardings = jax.tree.map(lambda a: spread if a.ndim == 3 else replicated, jax.eval_shape(init, keys[0]))
    tokens = (shape.tokens // sequence, sequence, H)
    x, target = (jax.device_put(jax.random.normal(k, tokens, jnp.dtype(shape.dtype)), spread) for k in keys[1:])
    return jax.jit(init, out_shardings=shardings)(keys[0]), x, target


def _step(
    moe: Callable[..., jax.Array],
    top_k: int,
    attention: Callable[..., jax.Array],
    state: State,
    x: jax.Array,
    target: jax.Array,
) -> tuple[State, Outcome]:
    def loss(layers: list[Layer]) -> jax.Array:
        y = x
        for layer in layers:
            y = _decoder_layer(moe, top_k, attention, layer, y)
        return jnp.mean(jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)))

    value, grads = jax.value_and_grad(loss)(state.layers)
    updates, moments = _OPTIMIZER.update(grads, state.optimizer, state.layers)
    layers: Any = optax.apply_updates(state.layers, updates)
    return State(layers, moments), Outcome(value, optax.tree.norm(grads))


def _decoder_layer(
    moe: Callable[..., jax.Array], top_k: int, attention: Callable[..., jax.Array], layer: Layer, x: jax.Array
) -> jax.Array:
    batch, length, hidden = x.shape
    low = jax.tree.map(lambda a: a.astype(x.dtype), layer)
    qkv = _rms_norm(x, layer.attention_norm) @ low.qkv
    q, k, v = jnp.split(qkv.reshape(batch, length, 3 * _heads(hidden), -1), 3, axis=2)
    x = x + attention(q, k, v).reshape(x.shape) @ low.out

    tokens = _rms_norm(x, layer.moe_norm).reshape(batch * length, hidden)
    routing = softmax_topk(tokens.astype(jnp.float32) @ layer.router, top_k)
    return x + moe(tokens, routing.expert_ids, routing.weights, low.experts).reshape(x.shape)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _attention(shape: Shape, mesh: Mesh) -> Callable[..., jax.Array]:
    """Causal, on ``[B, S, heads, H / heads]``; cuDNN's fused kernel where it takes the shape."""
    fused = backends.platform_of(mesh) == "cuda" and shape.dtype == "bfloat16" and shape.hidden % _HEAD == 0
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if fused else "xla")


def _timings(samples: dict[str, timing.Samples], first: str, tokens: int) -> tuple[list[StepTiming], str | None]:
    medians = {name: found.percentiles_ms()[1] for name, found in samples.items()}
    best = min((name for name in medians if name != first), key=medians.__getitem__, default=None)
    rows = []
    for name, found in samples.items():
        p10, ms, p90 = found.percentiles_ms()
        speedup = None if best is None else medians[best] / ms
        rows.append(StepTiming(name, ms, p10, p90, 1e3 * tokens / ms, speedup, found.median_mhz()))
    return rows, best


def _show(result: Result, first: str, console: Console) -> None:
    s = result.shape
    table = Table(
        title=f"Training step: {result.layers} layers, T {s.tokens} (S {result.sequence})  H {s.hidden}  I {s.inter}  "
        f"E {s.experts}  K {s.top_k}  {s.dtype}  on {s.ranks} devices"
    )
    table.add_column("MoE", no_wrap=True)
    for column in ("ms per step", "10-90 %", "tokens/s", "vs best other"):
        table.add_column(column, justify="right", no_wrap=True)
    for t in result.timings:
        table.add_row(
            t.contender,
            bench.ms(t.median_ms),
            f"{bench.ms(t.p10_ms)}-{bench.ms(t.p90_ms)}",
            f"{t.tokens_per_s:,.0f}",
            "" if t.speedup is None else f"x {t.speedup:.2f}",
        )
    for f in result.failures:
        table.add_row(f.contender, "failed", style="red")
    console.print(table)
    if result.best_of_others:
        console.print(f"Best of the others than {first}: {result.best_of_others}.")
    for name, outcome in result.outcomes.items():
        console.print(f"{name}: loss {outcome.loss:.5g}, norm of the gradient {outcome.gradient_norm:.5g}.")
    bench.show_exceptions(console, {f.contender: f.reason for f in result.failures}, result.not_timed)
    if not result.agrees:
        console.print(f"[bold red]FAILED[/]: loss or gradient norm differ by more than {result.tolerance:.0e}.")
