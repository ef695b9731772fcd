"""What the backends in plain JAX share: moving tokens over the EP axis, rounding, and the run-time checks of routes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_mok._call import Call


class RawStats(NamedTuple):
    """Per EP group: ``tokens_per_expert [E]``, ``rows_per_rank [P]`` and ``status []``, all int32."""

    tokens_per_expert: jax.Array
    rows_per_rank: jax.Array
    status: jax.Array


STATUS_OK, STATUS_ID_OUT_OF_RANGE, STATUS_OVER_CAPACITY = 0, 1, 2  # as in cuda/core/status.h


def rounded(dtype: Any, w: jax.Array) -> jax.Array:
    """``w`` in its own dtype, with no more precision than ``dtype``. XLA may leave out a cast there and back."""
    if w.dtype == dtype:
        return w
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(w, info.nexp, info.nmant)


def gather(call: Call, tree: Any) -> Any:
    """[T, ...] -> [P * T, ...], in rank order."""
    if call.axis is None:
        return tree
    return jax.tree.map(lambda a: jax.lax.all_gather(a, call.axis, tiled=True), tree)


def scatter_sum(call: Call, y: jax.Array) -> jax.Array:
    """[P * T, H] partial sums -> this rank's [T, H]."""
    if call.axis is None:
        return y
    return jax.lax.psum_scatter(y, call.axis, scatter_dimension=0, tiled=True)


def first_expert(call: Call) -> Any:
    return 0 if call.axis is None else jax.lax.axis_index(call.axis) * call.local_experts


def route_stats(call: Call, expert_ids: jax.Array) -> RawStats:
    """Counts and verdict of the whole group from each rank's own ids, ``[T, K]``; the same on every rank."""
    ids = expert_ids.reshape(-1)
    valid = (ids >= 0) & (ids < call.experts)
    per_expert = jnp.zeros(call.experts, jnp.int32).at[jnp.where(valid, ids, call.experts)].add(1, mode="drop")
    bad = (~valid & (ids != -1)).sum(dtype=jnp.int32)
    if call.axis is not None:
        per_expert, bad = jax.lax.psum((per_expert, bad), call.axis)
    rows = per_expert.reshape(call.ranks, call.local_experts).sum(axis=1, dtype=jnp.int32)
    status = jnp.where(rows.max() > call.max_rows, STATUS_OVER_CAPACITY, STATUS_OK)
    status = jnp.where(bad == 0, status, STATUS_ID_OUT_OF_RANGE)
    return RawStats(per_expert, rows, status.astype(jnp.int32))


def poison(y: jax.Array, stats: RawStats) -> jax.Array:
    """A program cannot raise from inside XLA's own operations, so a failed call is all NaN and says why in stats."""
    return jnp.where(stats.status == STATUS_OK, y, jnp.nan)
