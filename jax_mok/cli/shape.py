"""One layer's shapes on a mesh, and arrays for it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok as mok
from jax_mok.demo.settings import SettingsError


class Arrays(NamedTuple):
    """Arguments of ``mok.moe`` and a cotangent of its result."""

    x: Any
    expert_ids: Any
    router_weights: Any
    experts: mok.Experts
    shared: mok.Experts | None
    dy: Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """``tokens`` is over all ranks. ``hot_expert``: rows of expert 0, as a multiple of those of each other expert."""

    tokens: int
    hidden: int
    inter: int
    experts: int
    top_k: int
    ranks: int
    dtype: str
    shared_inter: int = 0
    hot_expert: float = 1.0

    def __post_init__(self) -> None:
        for name in ("tokens", "experts"):
            if (given := getattr(self, name)) % self.ranks:
                raise SettingsError(f"{name} = {given} cannot be spread evenly over {self.ranks} ranks.")
        if self.top_k > self.experts:
            raise SettingsError(f"top-{self.top_k} needs at least {self.top_k} experts; there are {self.experts}.")

    @property
    def forward_flop(self) -> int:
        """Of the routed experts: three matmuls for each of the ``T * K`` rows."""
        return 6 * self.tokens * self.top_k * self.hidden * self.inter

    def abstract(self, mesh: Mesh) -> Arrays:
        """Shapes, dtypes and shardings, without data."""
        by_rank, replicated = NamedSharding(mesh, P("expert")), NamedSharding(mesh, P())

        def struct(*shape: int, dtype: Any = self.dtype, sharding: NamedSharding = by_rank) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

        x, slots = (self.tokens, self.hidden), (self.tokens, self.top_k)
        up, down = (self.experts, self.hidden, self.inter), (self.experts, self.inter, self.hidden)
        shared = None
        if self.shared_inter:
            up_s, down_s = (self.hidden, self.shared_inter), (self.shared_inter, self.hidden)
            shared = mok.Experts(*(struct(*s, sharding=replicated) for s in (up_s, up_s, down_s)))
        return Arrays(
            x=struct(*x),
            expert_ids=struct(*slots, dtype=jnp.int32),
            router_weights=struct(*slots, dtype=jnp.float32),
            experts=mok.Experts(struct(*up), struct(*up), struct(*down)),
            shared=shared,
            dy=struct(*x),
        )

    def random(self, mesh: Mesh, seed: int) -> Arrays:
        """Normal values of the size that a trained layer has, and ``K`` different random experts per token; with a hot
        expert every slot chooses by itself, so that a token may have it more than once."""
        wanted = self.abstract(mesh)
        leaves, tree = jax.tree.flatten(wanted)
        scale = {self.hidden: self.hidden**-0.5, self.inter: self.inter**-0.5}
        keys = jax.random.split(jax.random.key(seed), len(leaves) + 1)

        def normal(key: jax.Array, like: Any) -> jax.Array:
            size = scale[like.shape[-2]] if like.ndim == 3 else 1.0
            return (size * jax.random.normal(key, like.shape, jnp.float32)).astype(like.dtype)

        arrays = jax.tree.unflatten(tree, [normal(k, like) for k, like in zip(keys, leaves, strict=False)])
        scores = jax.random.normal(keys[-1], (self.tokens, self.experts))
        top, ids = jax.lax.top_k(scores, self.top_k)
        if self.hot_expert != 1:
            share = jnp.ones(self.experts).at[0].set(self.hot_expert)
            ids = jax.random.categorical(keys[-1], jnp.log(share), shape=ids.shape)
        arrays = arrays._replace(expert_ids=ids.astype(jnp.int32), router_weights=jax.nn.softmax(top, axis=-1))
        return jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), arrays, wanted)
