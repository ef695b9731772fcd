"""The expert-parallel layers that a JAX user writes without this library, to be timed beside it.

A baseline is a way to move rows between devices times a grouped matmul:

    local/xla            one device, nothing to move
    all_gather/xla       every rank gathers all tokens, results are reduce-scattered
    all_to_all/xla       rows go to their experts and back by ``jax.lax.ragged_all_to_all``
    .../xla              ``jax.lax.ragged_dot``
    .../tokamax          ``tokamax.ragged_dot``, Pallas kernels for NVIDIA GPUs, with the tiles that it picks by itself

They take and return the arrays' dtype, accumulate in float32 at JAX's default precision, weight rows in float32 and are
differentiable. Where indices are a permutation they say so, so that no pass needs atomics for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_mok import backends
from jax_mok._config import Experts

NAMES = ("local/xla", "local/tokamax", "all_gather/xla", "all_gather/tokamax", "all_to_all/xla", "all_to_all/tokamax")

_AXIS = "expert"
_ROOM = 1.5  # rows that a rank can take, over the balanced load: what capacity factors usually are

GroupedMlp = Callable[[jax.Array, Experts, jax.Array], jax.Array]


def layer(name: str, mesh: Mesh) -> Callable[..., jax.Array]:
    """The baseline as ``layer(x [T, H], expert_ids [T, K], router_weights [T, K], experts) -> y [T, H]`` on global
    arrays. ``expert_ids`` of -1 are no expert. A call that would drop rows is all NaN."""
    move, matmul = name.split("/")
    run = {"local": _local, "all_gather": _all_gather, "all_to_all": _all_to_all}[move]
    mlp = functools.partial(_mlp, _GROUPED_MATMULS[matmul])
    return jax.shard_map(
        functools.partial(run, mlp), mesh=mesh, in_specs=(P(_AXIS),) * 4, out_specs=P(_AXIS), check_vma=False
    )


def refusal(name: str, mesh: Mesh) -> str | None:
    """Why the baseline cannot run on this mesh, or ``None``."""
    move, matmul = name.split("/")
    platform = backends.platform_of(mesh)
    if (move == "local") != (mesh.size == 1):
        return "one device only" if move == "local" else "one device has nothing to exchange: see local"
    if move == "all_to_all" and platform == "cpu":
        return "XLA has no ragged_all_to_all on CPUs"
    if matmul == "tokamax":
        if platform != "cuda":
            return "tokamax's kernels need an NVIDIA GPU"
        if importlib.util.find_spec("tokamax") is None:
            return "tokamax is not installed: pip install tokamax"
    return None


def overflow(mesh: Mesh, expert_ids: jax.Array, experts: int) -> str | None:
    """Why these ids, ``[T, K]``, do not fit in the room that the baselines have, or ``None``."""
    tokens, top_k = expert_ids.shape
    slots = tokens // mesh.size * top_k
    rows = jnp.where(expert_ids >= 0, expert_ids // (experts // mesh.size), mesh.size)
    most = int(jnp.bincount(rows.reshape(-1), length=mesh.size + 1)[: mesh.size].max())
    room = _room(slots, mesh.size)
    return None if most <= room else f"a rank would get {most} rows and has room for {room} ({_ROOM} x T x K)"


def _room(slots: int, ranks: int) -> int:
    return min(math.ceil(_ROOM * slots), ranks * slots)


def _xla_matmul(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(a, b, sizes, preferred_element_type=a.dtype)


def _tokamax_matmul(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    tokamax: Any = importlib.import_module("tokamax")
    return tokamax.ragged_dot(a, b, sizes, preferred_element_type=a.dtype, implementation="mosaic")


_GROUPED_MATMULS = {"xla": _xla_matmul, "tokamax": _tokamax_matmul}


def _mlp(dot: Callable[..., jax.Array], rows: jax.Array, w: Experts, sizes: jax.Array) -> jax.Array:
    """Each expert's MLP on its rows, ``[R, H]`` sorted by expert, ``sizes [E_l]`` of them each. What is behind them is
    zero: grouped matmuls leave it undefined, in the gradients too."""
    used = (jnp.arange(rows.shape[0]) < sizes.sum())[:, None]
    rows = jnp.where(used, rows, 0)
    gate, up = (dot(rows, m, sizes).astype(jnp.float32) for m in (w.gate, w.up))
    hidden = (jax.nn.silu(gate) * up).astype(rows.dtype)
    return jnp.where(used, dot(hidden, w.down, sizes), 0)


def _by_expert(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Slots in the order of their experts, those of other ids last; and the number of slots per expert."""
    key = jnp.where((ids >= 0) & (ids < experts), ids, experts)
    return jnp.argsort(key, stable=True), jnp.bincount(key, length=experts + 1)[:experts].astype(jnp.int32)


def _slot_rows(x: jax.Array, slots: jax.Array, top_k: int) -> jax.Array:
    """Row ``slots[i] // K`` of ``x [T, H]``, for a permutation ``slots`` of ``T * K``. By way of one row per slot, so
    that the gradient is a permutation and a sum over k."""
    tokens, hidden = x.shape
    rows = jnp.broadcast_to(x[:, None], (tokens, top_k, hidden)).reshape(tokens * top_k, hidden)
    return rows.at[slots].get(unique_indices=True)


def _combine(rows: jax.Array, slots: jax.Array, router_weights: jax.Array, dtype: Any) -> jax.Array:
    """Rows back at their slots, and the weighted sum over a token's."""
    by_slot = jnp.zeros_like(rows).at[slots].set(rows, unique_indices=True)
    by_slot = by_slot.reshape(*router_weights.shape, -1).astype(jnp.float32)
    return (by_slot * router_weights[..., None]).sum(axis=1).astype(dtype)


def _local(mlp: GroupedMlp, x: jax.Array, ids: jax.Array, router_weights: jax.Array, experts: Experts) -> jax.Array:
    slots, sizes = _by_expert(ids.reshape(-1), experts.gate.shape[0])
    rows = mlp(_slot_rows(x, slots, ids.shape[1]), experts, sizes)
    return _combine(rows, slots, router_weights, x.dtype)


def _all_gather(
    mlp: GroupedMlp, x: jax.Array, ids: jax.Array, router_weights: jax.Array, experts: Experts
) -> jax.Array:
    local_experts, top_k = experts.gate.shape[0], ids.shape[1]
    room = _room(ids.size, jax.lax.axis_size(_AXIS))
    all_x, all_ids, all_weights = (jax.lax.all_gather(a, _AXIS, tiled=True) for a in (x, ids, router_weights))
    slots, sizes = _by_expert(all_ids.reshape(-1) - jax.lax.axis_index(_AXIS) * local_experts, local_experts)
    slots = slots[:room]
    token = slots // top_k

    # Through float32 so that the gradient's sum over a token's rows is not rounded at every step.
    rows = mlp(all_x.astype(jnp.float32)[token].astype(x.dtype), experts, sizes)
    weights = all_weights.reshape(-1).at[slots].get(unique_indices=True)
    y = jnp.zeros(all_x.shape, jnp.float32).at[token].add(rows.astype(jnp.float32) * weights[:, None])
    y = jnp.where(sizes.sum() <= room, y, jnp.nan)
    return jax.lax.psum_scatter(y, _AXIS, scatter_dimension=0, tiled=True).astype(x.dtype)


def _all_to_all(
    mlp: GroupedMlp, x: jax.Array, ids: jax.Array, router_weights: jax.Array, experts: Experts
) -> jax.Array:
    local_experts, ranks, rank = experts.gate.shape[0], jax.lax.axis_size(_AXIS), jax.lax.axis_index(_AXIS)
    room = _room(ids.size, ranks)
    slots, sizes = _by_expert(ids.reshape(-1), ranks * local_experts)
    counts = jax.lax.all_gather(sizes, _AXIS).reshape(ranks, ranks, local_experts)  # from, to, expert
    fits = counts.sum(axis=(0, 2)).max() <= room
    counts = jnp.where(fits, counts, 0)  # or rows would be written behind the end of a peer's buffer
    rows_between = counts.sum(axis=2)
    sent, received = rows_between[rank], rows_between[:, rank]
    # Offsets: of what I send in my rows, and where it lands at the receiver; the same for the way back.
    send_from, receive_at = jnp.cumsum(sent) - sent, jnp.cumsum(received) - received
    lands_at = (jnp.cumsum(rows_between, axis=0) - rows_between)[rank]
    returns_to = (jnp.cumsum(rows_between, axis=1) - rows_between)[:, rank]

    mine = _slot_rows(x, slots, ids.shape[1])
    buffer = jnp.zeros((room, x.shape[1]), x.dtype)
    arrived = jax.lax.ragged_all_to_all(mine, buffer, send_from, sent, lands_at, received, axis_name=_AXIS)
    here = jnp.tile(jnp.arange(local_experts), ranks)
    expert = jnp.repeat(here, counts[:, rank].reshape(-1), total_repeat_length=room)
    expert = jnp.where(jnp.arange(room) < received.sum(), expert, local_experts)
    order, local_sizes = _by_expert(expert, local_experts)
    rows = mlp(arrived.at[order].get(unique_indices=True), experts, local_sizes)
    rows = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
    back = jax.lax.ragged_all_to_all(
        rows, jnp.zeros_like(mine), receive_at, received, returns_to, sent, axis_name=_AXIS
    )
    return jnp.where(fits, _combine(back, slots, router_weights, x.dtype), jnp.nan).astype(x.dtype)
