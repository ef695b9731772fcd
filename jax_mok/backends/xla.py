"""The fallback: sort, ``jax.lax.ragged_dot`` and XLA's collectives. Any platform; gradients are JAX's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_mok._call import Call
from jax_mok._config import Experts
from jax_mok.backends import collectives


def _dot(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    exact = jax.lax.Precision.HIGHEST
    return jax.lax.ragged_dot(rows, w, sizes, precision=exact, preferred_element_type=jnp.float32)


@jax.custom_jvp
def _product(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """``rows @ w`` in the dtype of ``rows``, summed in float32. A gradient of ``w`` is not rounded to that dtype."""
    return _dot(rows, _copy_of(w, rows), sizes)


@_product.defjvp
def _product_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (rows, w, sizes), (d_rows, d_w, _) = primals, tangents
    return _product(rows, w, sizes), _dot(d_rows, _copy_of(w, rows), sizes) + _dot(rows, d_w, sizes)


def _copy_of(w: jax.Array, rows: jax.Array) -> jax.Array:
    return collectives.rounded(rows.dtype, w).astype(rows.dtype)


def _ragged_mlp(rows: jax.Array, w: Experts, sizes: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(_product(rows, w.gate, sizes)) * _product(rows, w.up, sizes)
    return _product(hidden.astype(rows.dtype), w.down, sizes).astype(rows.dtype)


def _dense_mlp(x: jax.Array, w: Experts) -> jax.Array:
    return _ragged_mlp(x, Experts(*(m[None] for m in w)), jnp.full((1,), x.shape[0], jnp.int32))


def run(
    call: Call, x: jax.Array, expert_ids: jax.Array, router_weights: jax.Array, experts: Experts, shared: Experts | None
) -> tuple[jax.Array, collectives.RawStats]:
    """Gathers the group's tokens, runs this rank's experts on their rows, sums back at the tokens' homes."""
    all_x, all_ids, all_weights = collectives.gather(call, (x, expert_ids, router_weights))
    stats = collectives.route_stats(call, expert_ids)

    local = all_ids.reshape(-1) - collectives.first_expert(call)
    mine = (local >= 0) & (local < call.local_experts)
    slots = jnp.argsort(jnp.where(mine, local, call.local_experts), stable=True)[: call.max_rows]
    sizes = jnp.zeros(call.local_experts, jnp.int32).at[jnp.where(mine, local, call.local_experts)].add(1, mode="drop")
    token = slots // call.top_k
    used = mine[slots][:, None]

    rows = jnp.where(used, all_x[token], 0)
    out = _ragged_mlp(rows, experts, sizes)
    weighted = all_weights.reshape(-1)[slots][:, None] * out.astype(jnp.float32)
    y = jnp.zeros(all_x.shape, jnp.float32).at[token].add(jnp.where(used, weighted, 0))
    y = collectives.scatter_sum(call, y)
    if shared is not None:
        y = y + _dense_mlp(x, shared).astype(jnp.float32)
    return collectives.poison(y, stats).astype(x.dtype), stats
