"""A byte-level MoE transformer in Flax NNX: float32 parameters, bfloat16 compute, experts spread over the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.demo.settings import VOCABULARY, ModelConfig
from jax_mok.demo.task import LOSS_WEIGHT_BALANCE, RoutedCall, Task, next_byte_loss
from jax_mok.flax import Aux, MoE

DTYPE = jnp.bfloat16


class Attention(nnx.Module):
    """Causal self-attention, ``[B, S, H] -> [B, S, H]``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.qkv = nnx.Linear(config.hidden, 3 * config.hidden, use_bias=False, dtype=DTYPE, rngs=rngs)
        self.out = nnx.Linear(config.hidden, config.hidden, use_bias=False, dtype=DTYPE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, length, 3 * self.heads, -1), 3, axis=2)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.reshape(batch, length, hidden))


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, *, mesh: Mesh, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.hidden, dtype=DTYPE, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.hidden, dtype=DTYPE, rngs=rngs)
        self.moe = MoE(
            config.hidden,
            config.inter,
            config.experts,
            config.top_k,
            dtype=DTYPE,
            mesh=mesh,
            config=config.moe,
            rngs=rngs,
        )

    def moe_input(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The residual stream after the attention, and what the MoE block sees of it."""
        x = x + self.attention(self.attention_norm(x))
        return x, self.moe_norm(x)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Aux]:
        x, normed = self.moe_input(x)
        y, aux = self.moe(normed)
        return x + y, aux


class Transformer(nnx.Module):
    """``tokens [B, S] -> (logits [B, S, 256], load-balancing loss of all layers)``."""

    def __init__(self, config: ModelConfig, *, mesh: Mesh, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, config.hidden, dtype=DTYPE, rngs=rngs)
        self.position = nnx.Embed(config.sequence, config.hidden, dtype=DTYPE, rngs=rngs)
        self.blocks = nnx.List([Block(config, mesh=mesh, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.hidden, dtype=DTYPE, rngs=rngs)
        self.head = nnx.Linear(config.hidden, VOCABULARY, use_bias=False, dtype=DTYPE, rngs=rngs)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, balance = self.embedded(tokens), jnp.float32(0)
        for block in self.blocks:
            x, aux = block(x)
            balance = balance + aux.load_balancing_loss
        return self.head(self.norm(x)), balance


def build(config: ModelConfig, mesh: Mesh, seed: int) -> Task:
    """The model on a mesh, as plain functions of its parameters."""
    graph, params = nnx.split(Transformer(config, mesh=mesh, rngs=nnx.Rngs(seed)), nnx.Param)
    # The MoE blocks have placed their own parameters; everything else is replicated.
    replicated = NamedSharding(mesh, P())
    params = jax.tree.map(
        lambda a: a if isinstance(a.sharding, NamedSharding) else jax.device_put(a, replicated), params
    )

    def loss(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, balance = nnx.merge(graph, params)(tokens[:, :-1])
        nats = next_byte_loss(logits, tokens[:, 1:])
        return nats + LOSS_WEIGHT_BALANCE * balance, nats

    def routed(params: Any, tokens: jax.Array) -> RoutedCall:
        model = nnx.merge(graph, params)
        block = model.blocks[0]
        _, x = block.moe_input(model.embedded(tokens[:, :-1]))
        return RoutedCall.of(x, block.moe.router[...], block.moe.experts.arrays(), config.top_k)

    return Task(params, loss, routed)
