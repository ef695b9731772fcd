"""The MoE block that the Flax and the Equinox modules wrap: router, routed experts, shared expert and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_mok import router as _router
from jax_mok._api import moe
from jax_mok._config import Experts, MoEConfig
from jax_mok._mesh import ambient_mesh, check_experts_divide, check_token_axes

Router = Literal["softmax", "sigmoid"]

_KERNEL_INIT = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1)
_EXPERTS_INIT = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)


class Aux(NamedTuple):
    """What a training step needs beside ``y``. All over the whole batch, on all devices the same.

    - ``load_balancing_loss``: float32 scalar, see :func:`jax_mok.router.load_balancing_loss`.
    - ``router_z_loss``: float32 scalar, see :func:`jax_mok.router.router_z_loss`.
    - ``expert_load``: int32 ``[E]``, slots routed to each expert.
    """

    load_balancing_loss: jax.Array
    router_z_loss: jax.Array
    expert_load: jax.Array


class Weights(NamedTuple):
    """``router [H, E]``; ``experts`` with ``gate, up [E, H, I]``, ``down [E, I, H]``; ``shared`` with
    ``gate, up [H, I_s]``, ``down [I_s, H]``, or ``None``."""

    router: Any
    experts: Experts
    shared: Experts | None


@dataclasses.dataclass(frozen=True)
class Settings:
    """The block's hyperparameters. Frozen and hashable: a static attribute of the modules."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    router: Router = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int | None = None
    shared_intermediate: int | None = None
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32
    axis: str | None = "expert"
    token_axes: Sequence[str] | None = None
    config: MoEConfig = dataclasses.field(default_factory=MoEConfig)

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts", "shared_intermediate"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1.")
        if self.router not in get_args(Router):
            raise ValueError(f"router is {self.router!r}; it must be one of {', '.join(map(repr, get_args(Router)))}.")
        _router.check_top_k(self.top_k, self.num_experts)
        _router.check_groups(self.top_k, self.num_experts, self.num_groups, self.top_groups)
        if self.router == "softmax" and (self.scale, self.num_groups, self.top_groups) != (1.0, 1, None):
            raise ValueError(
                f"scale = {self.scale}, num_groups = {self.num_groups} and top_groups = {self.top_groups} belong to "
                "router='sigmoid'; the softmax router has none of them."
            )
        # One spelling of each value, so that equal settings are equal (and hash so) however they were written.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        object.__setattr__(self, "param_dtype", jnp.dtype(self.param_dtype))
        if self.token_axes is not None:
            axes = self.token_axes
            object.__setattr__(self, "token_axes", (axes,) if isinstance(axes, str) else tuple(axes))


def check_mesh(settings: Settings, mesh: Any) -> Any:
    """Returns the mesh known now (``mesh``, else the ambient one, else ``None``), refusing one that cannot hold the
    experts: better at construction than after the first batch is loaded."""
    mesh = mesh if mesh is not None else ambient_mesh()
    if mesh is None or settings.axis is None:
        return mesh
    check_token_axes(mesh, settings.axis, settings.token_axes)
    check_experts_divide(mesh, settings.axis, settings.num_experts)
    return mesh


def init(key: jax.Array, settings: Settings) -> Weights:
    """Random weights, each with the variance that keeps the scale of its input (LeCun), in ``param_dtype``."""

    def mlp(key: jax.Array, init: Any, width: int, *lead: int) -> Experts:
        up, down = (*lead, settings.hidden, width), (*lead, width, settings.hidden)
        keys = jax.random.split(key, 3)
        return Experts(*(init(k, shape, settings.param_dtype) for k, shape in zip(keys, (up, up, down), strict=True)))

    router_key, experts_key, shared_key = jax.random.split(key, 3)
    shared = settings.shared_intermediate
    return Weights(
        _KERNEL_INIT(router_key, (settings.hidden, settings.num_experts), settings.param_dtype),
        mlp(experts_key, _EXPERTS_INIT, settings.intermediate, settings.num_experts),
        None if shared is None else mlp(shared_key, _KERNEL_INIT, shared),
    )


def init_selection_bias(settings: Settings) -> jax.Array | None:
    return jnp.zeros(settings.num_experts, jnp.float32) if settings.router == "sigmoid" else None


def no_selection_bias() -> ValueError:
    return ValueError("update_bias: a block with router='softmax' has no selection bias; use router='sigmoid'.")


def partition_specs(settings: Settings) -> Weights:
    """Experts over the EP axis on their first dimension, all else replicated."""
    by_expert = P(settings.axis, None, None)
    replicated = P(None, None)
    return Weights(
        replicated,
        Experts(*[by_expert] * 3),
        None if settings.shared_intermediate is None else Experts(*[replicated] * 3),
    )


def apply(
    settings: Settings, weights: Weights, selection_bias: jax.Array | None, x: jax.Array, mesh: Any
) -> tuple[jax.Array, Aux]:
    """``x [..., H]`` -> ``y [..., H]`` in the compute dtype, and :class:`Aux`."""
    if x.shape[-1:] != (settings.hidden,):
        raise ValueError(f"x must be [..., H] with H = hidden = {settings.hidden}, got {list(x.shape)}.")
    check_mesh(settings, mesh)
    # Full float32: a rounded logit sends a token to another expert, which no later precision repairs.
    logits = jnp.dot(x.astype(jnp.float32), weights.router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    if settings.router == "softmax":
        routing = _router.softmax_topk(logits, settings.top_k, settings.normalize)
    else:
        routing = _router.sigmoid_topk(
            logits,
            settings.top_k,
            selection_bias,
            settings.scale,
            settings.normalize,
            settings.num_groups,
            settings.top_groups,
        )

    # The layer takes float32 parameters as they are, whatever its dtype, and gives float32 gradients.
    experts, shared = weights.experts, weights.shared
    if any(w.dtype != jnp.float32 for w in jax.tree.leaves((experts, shared))):
        experts, shared = jax.tree.map(lambda w: w.astype(settings.dtype), (experts, shared))

    y = moe(
        x.astype(settings.dtype),
        routing.expert_ids,
        routing.weights,
        experts,
        shared=shared,
        mesh=mesh,
        axis=settings.axis,
        token_axes=settings.token_axes,
        config=settings.config,
    )
    # Counted from the ids although the layer's Stats has the same numbers: the loss needs them in the backward pass,
    # and under jax.checkpoint they would bring back the whole forward call.
    aux = Aux(
        _router.load_balancing_loss(routing.probs, routing.expert_ids),
        _router.router_z_loss(logits),
        _router.expert_load(routing.expert_ids, settings.num_experts),
    )
    return y, aux
