"""What a framework's model hands to the training loop, which knows no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

import jax_mok as mok
from jax_mok import router

LOSS_WEIGHT_BALANCE = 0.01


class RoutedCall(NamedTuple):
    """The arguments of one ``mok.moe`` call as the model makes it: ``x [T, H]``, ``expert_ids`` and
    ``router_weights [T, K]``, and the experts, float32."""

    x: jax.Array
    expert_ids: jax.Array
    router_weights: jax.Array
    experts: mok.Experts

    @classmethod
    def of(cls, x: jax.Array, router_kernel: jax.Array, experts: mok.Experts, top_k: int) -> Self:
        """From what an MoE block sees and its parameters."""
        x = x.reshape(-1, x.shape[-1])
        routing = router.softmax_topk(x.astype(jnp.float32) @ router_kernel, top_k)
        return cls(x, routing.expert_ids, routing.weights, experts)


class Task(NamedTuple):
    """- ``params``: float32 pytree, placed on the mesh.
    - ``loss``: ``(params, tokens int32 [B, S + 1]) -> (loss, nats)``: what is minimised, and without the router's
      part the mean cross entropy in nats per byte.
    - ``routed``: ``(params, tokens) ->`` :class:`RoutedCall` of the first block.
    """

    params: Any
    loss: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
    routed: Callable[[Any, jax.Array], RoutedCall]


def next_byte_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy in float32; ``logits [B, S, 256]``, ``targets [B, S]``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()
