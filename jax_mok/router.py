"""Routers: from logits to the ``expert_ids`` and ``router_weights`` that :func:`jax_mok.moe` takes, and what keeps
experts evenly loaded. Plain functions of arrays; nothing here is tied to the layer, so bring your own where these do
not fit.

Selections are compares against ``arange(E)`` and not gathers or scatters: they fuse into one pass, they work on arrays
sharded in any way over tokens, and their gradients are sums in a fixed order.

Sources:

- Switch: Fedus et al., "Switch Transformers", arXiv:2101.03961, section 2.2
- GShard: Lepikhin et al., arXiv:2006.16668
- ST-MoE: Zoph et al., arXiv:2202.08906, section 3.1
- Aux-loss-free: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for MoE", arXiv:2408.15664
- DeepSeek-V3: arXiv:2412.19437, section 2.1.2
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

# DeepSeek-V3's own guard: all K sigmoids can underflow to zero at once.
_TINY = 1e-20


class Routing(NamedTuple):
    """Where each token goes.

    **Fields**

    - ``expert_ids``: int32 ``[..., K]``, best first; equal scores in the order of the experts. Not differentiable.
    - ``weights``: float32 ``[..., K]``, the ``router_weights`` of :func:`jax_mok.moe`.
    - ``probs``: float32 ``[..., E]``, sums to 1 over ``E``; for :func:`load_balancing_loss`.
    """

    expert_ids: jax.Array
    weights: jax.Array
    probs: jax.Array


def softmax_topk(logits: jax.Array, k: int, normalize: bool = True) -> Routing:
    """Softmax over all experts, then the ``k`` largest (Switch, GShard; Mixtral and Qwen3-MoE renormalise).

    **Arguments**

    - ``logits``: ``[..., E]``, any float dtype; the softmax is in float32.
    - ``k``: experts per token, ``1 .. E``.
    - ``normalize``: divide a token's ``k`` weights by their sum. That is the softmax over the chosen logits alone.

    **Returns** :class:`Routing`. **Raises** ``ValueError`` for ``k`` outside ``1 .. E``.
    """
    check_top_k(k, _num_experts(logits))
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    expert_ids = _top_ids(probs, k)
    weights = _chosen(probs, expert_ids)
    if normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routing(expert_ids, weights, probs)


def sigmoid_topk(
    logits: jax.Array,
    k: int,
    bias: jax.Array | None = None,
    scale: float = 1.0,
    normalize: bool = True,
    num_groups: int = 1,
    top_groups: int | None = None,
) -> Routing:
    """The router of DeepSeek-V3 (equations 12-16): the ``k`` largest of ``sigmoid(logits) + bias``, weighted by the
    sigmoids without the bias.

    **Arguments**

    - ``logits``: ``[..., E]``, any float dtype; the computation is in float32.
    - ``k``: experts per token, ``1 .. E``.
    - ``bias``: ``[E]``, steers the selection only: no gradient reaches it. Move it with
      :func:`update_selection_bias`.
    - ``scale``: factor on the weights (2.5 in DeepSeek-V3).
    - ``normalize``: divide a token's ``k`` weights by their sum, before ``scale``.
    - ``num_groups``, ``top_groups``: group-limited selection. Experts form ``num_groups`` runs of equal length; a
      token picks the ``top_groups`` of them whose two best biased scores have the largest sum (8 and 4 in
      DeepSeek-V3), and its experts from these. ``top_groups=None`` = no limit.

    **Returns** :class:`Routing`; its ``probs`` are the sigmoids divided by their sum over ``E`` (equation 19).
    **Raises** ``ValueError`` for ``k`` outside ``1 .. E``, a bias of another shape, and groups that do not fit.
    """
    experts = _num_experts(logits)
    check_top_k(k, experts)
    check_groups(k, experts, num_groups, top_groups)
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    ranking = jax.lax.stop_gradient(scores)
    if bias is not None:
        if bias.shape != (experts,):
            raise ValueError(f"bias must be [E] = [{experts}] as the logits have it, got {list(bias.shape)}.")
        bias = jax.lax.stop_gradient(bias).astype(jnp.float32)
        ranking = ranking + jnp.expand_dims(bias, range(ranking.ndim - 1))
    if top_groups is not None and top_groups < num_groups:
        ranking = _limit_to_groups(ranking, num_groups, top_groups)
    expert_ids = _top_ids(ranking, k)
    weights = _chosen(scores, expert_ids)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _TINY)
    probs = scores / (scores.sum(axis=-1, keepdims=True) + _TINY)
    return Routing(expert_ids, scale * weights, probs)


def load_balancing_loss(probs: jax.Array, expert_ids: jax.Array) -> jax.Array:
    """``E * sum_e f_e * P_e`` (Switch, equations 4-6; for top-k as in DeepSeek-V3, equations 17-20, but over the whole
    batch): ``f_e`` is the fraction of all slots that went to expert ``e``, ``P_e`` the mean of its ``probs``.

    1 when both are even, for any ``K``; ``E`` when everything goes to one expert. Some codebases count slots per token
    and get ``K`` times this. Gradients flow through ``P_e`` alone.

    **Arguments**

    - ``probs``: float32 ``[..., E]``.
    - ``expert_ids``: int32 ``[..., K]``. Slots of -1 are left out of ``f_e``, and tokens that have no other
      (padding) out of ``P_e``.

    **Returns** a float32 scalar; 0 for a batch without any routed slot.
    """
    experts = _num_experts(probs)
    load = expert_load(expert_ids, experts).astype(jnp.float32)
    routed = (expert_ids >= 0).any(axis=-1)
    tokens = tuple(range(routed.ndim))
    mean = jnp.where(routed[..., None], probs.astype(jnp.float32), 0).sum(axis=tokens)
    mean = mean / jnp.maximum(routed.sum(dtype=jnp.float32), 1)
    return experts * jnp.sum(load / jnp.maximum(load.sum(), 1) * mean)


def router_z_loss(logits: jax.Array) -> jax.Array:
    """Mean over tokens of ``logsumexp(logits)**2`` (ST-MoE, equation 5): keeps logits small, where rounding is fine.

    **Arguments**: ``logits``, ``[..., E]``. **Returns** a float32 scalar.
    """
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) ** 2)


def expert_load(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    """Slots routed to each expert, over all tokens.

    **Arguments**: ``expert_ids``, int32 ``[..., K]``, -1 = no expert; ``num_experts``, ``E``.

    **Returns** int32 ``[E]``.
    """
    return _count(expert_ids, num_experts)


def update_selection_bias(bias: jax.Array, load: jax.Array, rate: float = 1e-3) -> jax.Array:
    """``bias + rate * sign(mean(load) - load)``: one step, after each training step, of balancing without a loss
    (Aux-loss-free, algorithm 1; DeepSeek-V3 with ``rate`` 0.001, and 0 for the last 500 B tokens).

    **Arguments**: ``bias`` ``[E]``; ``load`` ``[E]``, :func:`expert_load` of the whole batch; ``rate``.

    **Returns** the new bias, in the dtype of ``bias``.
    """
    if bias.shape != load.shape or bias.ndim != 1:
        raise ValueError(f"bias and load must both be [E], got {list(bias.shape)} and {list(load.shape)}.")
    load = load.astype(jnp.float32)
    return (bias + rate * jnp.sign(load.mean() - load)).astype(bias.dtype)


def check_top_k(k: int, num_experts: int) -> None:
    """Raises ``ValueError`` unless ``1 <= k <= num_experts``."""
    if not 1 <= k <= num_experts:
        raise ValueError(f"top-k of {k} experts per token is impossible with {num_experts}: k must be 1 .. E.")


def check_groups(k: int, num_experts: int, num_groups: int, top_groups: int | None) -> None:
    """Raises ``ValueError`` unless ``k`` experts can be chosen from ``top_groups`` of ``num_groups`` equal groups."""
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"{num_experts} experts do not form {num_groups} groups of equal size: it must divide E.")
    if top_groups is None:
        return
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups = {top_groups} must be 1 .. num_groups = {num_groups}.")
    if k > top_groups * (num_experts // num_groups):
        raise ValueError(
            f"top-k of {k} experts per token cannot come from {top_groups} groups of {num_experts // num_groups}: "
            f"they hold {top_groups * (num_experts // num_groups)}."
        )


def _num_experts(logits: jax.Array) -> int:
    if logits.ndim < 1:
        raise ValueError("logits and probs must be [..., E], got a scalar.")
    return logits.shape[-1]


def _one_hot(ids: jax.Array, size: int) -> jax.Array:
    return jax.nn.one_hot(ids, size, dtype=jnp.bool_)


def _top_ids(ranking: jax.Array, k: int) -> jax.Array:
    return jax.lax.top_k(jax.lax.stop_gradient(ranking), k)[1].astype(jnp.int32)


# jit even when called eagerly: the [..., K, E] comparisons below are never held in memory once they are fused.
@functools.partial(jax.jit, static_argnums=1)
def _count(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    return _one_hot(expert_ids, num_experts).sum(axis=tuple(range(expert_ids.ndim)), dtype=jnp.int32)


@jax.jit
def _chosen(scores: jax.Array, expert_ids: jax.Array) -> jax.Array:
    return jnp.where(_one_hot(expert_ids, scores.shape[-1]), scores[..., None, :], 0).sum(axis=-1)


def _limit_to_groups(ranking: jax.Array, num_groups: int, top_groups: int) -> jax.Array:
    grouped = ranking.reshape(*ranking.shape[:-1], num_groups, -1)
    best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
    allowed = _one_hot(_top_ids(best_two, top_groups), num_groups).any(axis=-2)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranking.shape)
