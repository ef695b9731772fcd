"""The definition of the layer, dense and without intermediate rounding. Slow on purpose; for tests.

    y_t = sum_k w_tk * f_{e_tk}(x_t) + f_shared(x_t),    f(x) = (silu(x W_g) * (x W_u)) W_d

Computes in float32, or in float64 where the arguments are (jax.enable_x64). Gradients are JAX's own. Master weights are
rounded to the dtype of ``x``, their gradients are not.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_mok._call import Call
from jax_mok._config import Experts
from jax_mok.backends import collectives

_EXACT = jax.lax.Precision.HIGHEST


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rounded(dtype: Any, weights: Any) -> Any:
    return jax.tree.map(lambda w: collectives.rounded(dtype, w), weights)


@_rounded.defjvp
def _rounded_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _rounded(dtype, *primals), tangents[0]


def _mlp(x: jax.Array, w: Experts) -> jax.Array:
    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.dot(a, b, precision=_EXACT)

    return dot(jax.nn.silu(dot(x, w.gate)) * dot(x, w.up), w.down)


def dense_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    experts: Experts,
    shared: Experts | None = None,
    first_expert: Any = 0,
) -> jax.Array:
    """Every expert on every token, weighted. ``x [T, H]``; ids outside this block of experts contribute nothing.

    Returns ``[T, H]`` in the computing dtype (float32, or float64 for float64 arguments).
    """
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x = x.astype(dtype)

    def add_expert(y: jax.Array, item: tuple[jax.Array, Experts]) -> tuple[jax.Array, None]:
        e, w = item
        weight = jnp.where(expert_ids == e, router_weights.astype(dtype), 0)
        chosen = (expert_ids == e).any(axis=-1, keepdims=True)
        out = _mlp(jnp.where(chosen, x, 0), Experts(*(m.astype(dtype) for m in w)))
        # select, not multiply: a token that did not choose e must not meet its NaN or Inf
        return y + jnp.where(chosen, weight.sum(axis=-1, keepdims=True) * out, 0), None

    ids = first_expert + jnp.arange(experts.gate.shape[0], dtype=jnp.int32)
    y, _ = jax.lax.scan(add_expert, jnp.where(False, x, 0), (ids, experts))
    if shared is not None:
        y = y + _mlp(x, Experts(*(m.astype(dtype) for m in shared)))
    return y


def run(
    call: Call, x: jax.Array, expert_ids: jax.Array, router_weights: jax.Array, experts: Experts, shared: Experts | None
) -> tuple[jax.Array, collectives.RawStats]:
    """One rank's share: its experts on the tokens of the whole group."""
    experts, shared = _rounded(x.dtype, (experts, shared))
    all_x, all_ids, all_weights = collectives.gather(call, (x, expert_ids, router_weights))
    stats = collectives.route_stats(call, expert_ids)
    first = collectives.first_expert(call)
    y = collectives.scatter_sum(call, dense_moe(all_x, all_ids, all_weights, experts, first_expert=first))
    if shared is not None:
        y = y + _mlp(x.astype(y.dtype), Experts(*(m.astype(y.dtype) for m in shared)))
    return collectives.poison(y, stats).astype(x.dtype), stats
