"""Inputs at realistic scale, the float64 oracle and the measures that the layer's tests share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh

import jax_mok as mok

# rel-L2 against the float64 oracle: outputs, gradients (worst expert of each weight)
LIMITS = {"bfloat16": (4e-3, 6e-3), "float32": (2e-6, 2e-6)}


class Inputs(NamedTuple):
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    experts: mok.Experts
    shared: mok.Experts | None
    dy: np.ndarray


class Result(NamedTuple):
    y: np.ndarray
    dx: np.ndarray
    dw: np.ndarray
    experts: mok.Experts
    shared: mok.Experts | None


def make_inputs(T, H, I, E, K, *, dtype="float32", shared=0, ids=None, seed=0) -> Inputs:
    """Unit-variance tokens, weights scaled to keep it; ids drawn with some -1 unless given."""
    rng = np.random.default_rng(seed)
    dt = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(dt)

    def experts(*lead, width):
        return mok.Experts(
            normal(*lead, H, width, scale=H**-0.5),
            normal(*lead, H, width, scale=H**-0.5),
            normal(*lead, width, H, scale=width**-0.5),
        )

    if ids is None:
        ids = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32) if K <= E else rng.integers(0, E, (T, K))
        ids = np.where(rng.random((T, K)) < 0.05, -1, ids)
    ids = np.broadcast_to(np.asarray(ids, np.int32), (T, K)).copy()
    weights = np.exp(rng.standard_normal((T, K)))
    weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return Inputs(
        normal(T, H), ids, weights, experts(E, width=I), experts(width=shared) if shared else None, normal(T, H)
    )


def _low(tree):
    return jax.tree.map(lambda a: a.astype(ml_dtypes.bfloat16), tree)


def with_master_weights(*args, **kwargs) -> tuple[Inputs, Inputs]:
    """bfloat16 tokens with float32 weights that bfloat16 does not hold, and the same with the weights rounded."""
    wide = make_inputs(*args, dtype="float32", **kwargs)
    wide = wide._replace(x=_low(wide.x), dy=_low(wide.dy))
    return wide, wide._replace(experts=_low(wide.experts), shared=_low(wide.shared))


def assert_rounds_to(got: Result, want: Result) -> None:
    """Float32 weight gradients, once rounded, and all else have the bits of the call with rounded weights."""
    grads = (*got.experts, *(got.shared or ()))
    assert {g.dtype.name for g in grads} == {"float32"}
    assert all((g != _low(g).astype(np.float32)).any() for g in grads if g.any())  # more than bfloat16 holds
    assert_same_bits(got._replace(experts=_low(got.experts), shared=_low(got.shared)), want)


def _silu(g):
    with np.errstate(over="ignore"):
        return g / (1 + np.exp(-g))


def _mlp_with_grads(x, gate, up, down, weight, dy):
    """One expert's rows in float64: f(x), and the gradients of weight * <dy, f(x)>."""
    g, u = x @ gate, x @ up
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-g))
    h = g * s * u
    y = h @ down
    dhu = dy @ down.T
    dh = weight[:, None] * dhu
    d_gate, d_up = dh * u * (s + g * s * (1 - s)), dh * g * s
    return (
        y,
        d_gate @ gate.T + d_up @ up.T,
        (dhu * h).sum(1),
        mok.Experts(x.T @ d_gate, x.T @ d_up, (weight[:, None] * h).T @ dy),
    )


def oracle(inputs: Inputs) -> Result:
    """The layer's definition and its gradients, written out in float64 numpy."""
    x, weights, dy = (np.asarray(a, np.float64) for a in (inputs.x, inputs.weights, inputs.dy))
    experts = mok.Experts(*(np.asarray(a, np.float64) for a in inputs.experts))
    y, dx, dw = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    grads = mok.Experts(*(np.zeros_like(a) for a in experts))
    for e in range(experts.gate.shape[0]):
        token, k = np.nonzero(inputs.ids == e)
        if not len(token):
            continue
        out, d_in, d_weight, d_expert = _mlp_with_grads(
            x[token], *(a[e] for a in experts), weights[token, k], dy[token]
        )
        out *= weights[token, k, None]
        for slot in np.unique(k):  # a token may have this expert in several slots, in each of them once
            rows = k == slot
            y[token[rows]] += out[rows]
            dx[token[rows]] += d_in[rows]
        dw[token, k] = d_weight
        for total, part in zip(grads, d_expert, strict=True):
            total[e] = part
    shared = None
    if inputs.shared is not None:
        out, d_in, _, shared = _mlp_with_grads(
            x, *(np.asarray(a, np.float64) for a in inputs.shared), np.ones(len(x)), dy
        )
        y, dx = y + out, dx + d_in
    return Result(y, dx, dw, grads, shared)


def mesh_of(*sizes, names=("expert",), devices=None, axis_type=AxisType.Auto) -> Mesh:
    devices = jax.devices() if devices is None else devices
    n = int(np.prod(sizes))
    return Mesh(np.array(devices[:n]).reshape(sizes), names, axis_types=(axis_type,) * len(names))


def layer_step(inputs: Inputs, mesh=None, config=mok.MoEConfig(), **kwargs):  # noqa: B008
    """A function without arguments: output and all gradients, by one jitted program, as numpy."""

    def layer(x, weights, experts, shared):
        return mok.moe(x, ids, weights, experts, shared=shared, mesh=mesh, config=config, **kwargs)

    @jax.jit
    def step(x, weights, experts, shared, dy):
        y, pull = jax.vjp(layer, x, weights, experts, shared)
        return y, *pull(dy)

    x, ids, weights, experts, shared, dy = jax.tree.map(jnp.asarray, inputs)
    return lambda: jax.tree.map(np.asarray, Result(*step(x, weights, experts, shared, dy)))


def run_layer(*args, **kwargs) -> Result:
    return layer_step(*args, **kwargs)()


def rel_l2(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / norm) if norm else (0.0 if not got.any() else np.inf)


def errors(got: Result, want: Result) -> dict[str, float]:
    """rel-L2 per tensor, for expert weights the worst expert; an empty expert must be exactly zero."""
    found = {name: rel_l2(getattr(got, name), getattr(want, name)) for name in ("y", "dx", "dw")}
    for name, a, b in zip(mok.Experts._fields, got.experts, want.experts, strict=True):
        found[f"d_{name}"] = max(rel_l2(a[e], b[e]) for e in range(len(b)))
    if want.shared is not None:
        for name, a, b in zip(mok.Experts._fields, got.shared, want.shared, strict=True):
            found[f"d_shared_{name}"] = rel_l2(a, b)
    return found


def assert_accurate(got: Result, want: Result, dtype: str) -> None:
    output, gradient = LIMITS[dtype]
    found = errors(got, want)
    bad = {k: v for k, v in found.items() if not v <= (output if k == "y" else gradient)}
    assert not bad, f"rel-L2 over the limits {LIMITS[dtype]} for {dtype}: {bad}; all: {found}"


def bits(tree) -> list[np.ndarray]:
    return [np.ascontiguousarray(a).view(np.uint8) for a in jax.tree.leaves(jax.tree.map(np.asarray, tree))]


def assert_same_bits(got, want) -> None:
    for path, a, b in zip(jax.tree.leaves_with_path(want), bits(got), bits(want), strict=True):
        assert a.shape == b.shape
        assert (a == b).all(), f"{jax.tree_util.keystr(path[0])}: {(a != b).sum()} of {a.size} bytes differ"
