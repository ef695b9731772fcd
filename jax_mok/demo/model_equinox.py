"""A byte-level MoE transformer in Equinox: float32 parameters, bfloat16 compute, experts spread over the mesh."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_mok.demo.settings import VOCABULARY, ModelConfig
from jax_mok.demo.task import LOSS_WEIGHT_BALANCE, RoutedCall, Task, next_byte_loss
from jax_mok.equinox import Aux, MoE, shardings, trainable

DTYPE = jnp.bfloat16


def low_precision(module: Any) -> Any:
    """The module with its parameters in the compute dtype. Not for MoE blocks: they cast by themselves, and keep the
    router in float32."""
    return jax.tree.map(lambda a: a.astype(DTYPE) if eqx.is_inexact_array(a) else a, module)


def per_token(layer: Any, x: jax.Array) -> jax.Array:
    """Equinox layers take one vector; ``x`` is ``[B, S, H]``."""
    return jax.vmap(jax.vmap(low_precision(layer)))(x)


class Block(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    moe_norm: eqx.nn.RMSNorm
    moe: MoE

    def __init__(self, config: ModelConfig, *, key: jax.Array) -> None:
        attention_key, moe_key = jax.random.split(key)
        self.attention_norm = eqx.nn.RMSNorm(config.hidden, use_bias=False)
        self.attention = eqx.nn.MultiheadAttention(config.heads, config.hidden, key=attention_key)
        self.moe_norm = eqx.nn.RMSNorm(config.hidden, use_bias=False)
        self.moe = MoE(
            config.hidden,
            config.inter,
            config.experts,
            config.top_k,
            dtype=DTYPE,
            config=config.moe,
            key=moe_key,
        )

    def moe_input(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The residual stream after the attention, and what the MoE block sees of it."""
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        attention = low_precision(self.attention)
        normed = per_token(self.attention_norm, x)
        x = x + jax.vmap(lambda sequence: attention(sequence, sequence, sequence, mask=causal))(normed)
        return x, per_token(self.moe_norm, x)

    def __call__(self, x: jax.Array, mesh: Mesh) -> tuple[jax.Array, Aux]:
        x, normed = self.moe_input(x)
        y, aux = self.moe(normed, mesh=mesh)  # the whole batch at once: an MoE block is not vmapped
        return x + y, aux


class Transformer(eqx.Module):
    """``tokens [B, S] -> (logits [B, S, 256], load-balancing loss of all layers)``."""

    embed: jax.Array
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, config: ModelConfig, *, key: jax.Array) -> None:
        embed_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + config.layers)
        scale = config.hidden**-0.5
        self.embed = scale * jax.random.normal(embed_key, (VOCABULARY, config.hidden))
        self.position = scale * jax.random.normal(position_key, (config.sequence, config.hidden))
        self.blocks = [Block(config, key=key) for key in block_keys]
        self.norm = eqx.nn.RMSNorm(config.hidden, use_bias=False)
        self.head = eqx.nn.Linear(config.hidden, VOCABULARY, use_bias=False, key=head_key)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        return (self.embed[tokens] + self.position[: tokens.shape[1]]).astype(DTYPE)

    def __call__(self, tokens: jax.Array, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
        x, balance = self.embedded(tokens), jnp.float32(0)
        for block in self.blocks:
            x, aux = block(x, mesh)
            balance = balance + aux.load_balancing_loss
        return per_token(self.head, per_token(self.norm, x)), balance


def build(config: ModelConfig, mesh: Mesh, seed: int) -> Task:
    """The model on a mesh, as plain functions of its parameters."""
    model = Transformer(config, key=jax.random.key(seed))
    params, rest = eqx.partition(eqx.filter_shard(model, shardings(model, mesh)), trainable(model))

    def loss(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, balance = eqx.combine(params, rest)(tokens[:, :-1], mesh)
        nats = next_byte_loss(logits, tokens[:, 1:])
        return nats + LOSS_WEIGHT_BALANCE * balance, nats

    def routed(params: Any, tokens: jax.Array) -> RoutedCall:
        model = eqx.combine(params, rest)
        block = model.blocks[0]
        _, x = block.moe_input(model.embedded(tokens[:, :-1]))
        return RoutedCall.of(x, block.moe.router, block.moe.experts, config.top_k)

    return Task(params, loss, routed)
