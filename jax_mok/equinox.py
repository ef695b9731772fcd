"""A mixture-of-experts block for Equinox: :class:`MoE`, and helpers for models that contain such blocks.

block = MoE(hidden=2048, intermediate=768, num_experts=128, top_k=8, key=jax.random.key(0))
y, aux = block(x)
loss = task_loss(y) + 0.01 * aux.load_balancing_loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mok import _block
from jax_mok._block import Aux, Router
from jax_mok._config import Experts, MoEConfig
from jax_mok.router import update_selection_bias

__all__ = ["Aux", "MoE", "partition_specs", "shard", "shardings", "trainable"]


class MoE(eqx.Module):
    """Router, routed experts and an optional shared expert: ``y, aux = block(x)``.

    **Arguments**

    - ``hidden``, ``intermediate``: ``H``, and the width ``I`` of each routed expert.
    - ``num_experts``, ``top_k``: ``E``, and the experts per token ``K``.
    - ``router``: ``"softmax"`` (:func:`jax_mok.router.softmax_topk`) or ``"sigmoid"``
      (:func:`jax_mok.router.sigmoid_topk`, with a selection bias).
    - ``normalize``: a token's ``K`` weights sum to 1.
    - ``scale``, ``num_groups``, ``top_groups``: of the sigmoid router.
    - ``shared_intermediate``: width ``I_s`` of an expert that every token visits; ``None`` = no such expert.
    - ``dtype``: compute dtype, bfloat16 or float32; also that of ``y``. The router computes in float32.
    - ``param_dtype``: dtype of the parameters and so of their gradients. With float32 the experts' gradients are never
      rounded to ``dtype`` (:func:`jax_mok.moe`, "Master weights").
    - ``axis``: mesh axis of the EP group; ``None`` = every device holds all experts. The mesh itself is no part of the
      module: it is the ambient one (``jax.set_mesh``) or an argument of the call.
    - ``token_axes``: mesh axes that the first dimension of ``x`` is sharded over, as in :func:`jax_mok.moe`.
    - ``config``: :class:`jax_mok.MoEConfig`.
    - ``key``: for the initial weights.

    **Leaves**: ``router [H, E]``; ``experts`` with ``gate``, ``up`` ``[E, H, I]``, ``down [E, I, H]``; ``shared`` with
    ``gate``, ``up`` ``[H, I_s]``, ``down [I_s, H]``, or ``None``; ``selection_bias [E]``, or ``None``. All else is one
    static, hashable field.

    The selection bias is an array and so looks like a parameter. No gradient reaches it (it is behind
    ``stop_gradient``: a gradient of zeros), but weight decay or noise of an optimizer would. Keep it out with

        params, rest = eqx.partition(model, trainable(model))
        grads = jax.grad(lambda params: loss(eqx.combine(params, rest)))(params)

    **Raises** ``ValueError`` where ``E`` is not a multiple of the size of ``axis``, at construction under an ambient
    mesh, else in the call; and for sizes and names that do not fit.
    """

    router: jax.Array
    experts: Experts
    shared: Experts | None
    selection_bias: jax.Array | None
    settings: _block.Settings = eqx.field(static=True)

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        router: Router = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int | None = None,
        shared_intermediate: int | None = None,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        axis: str | None = "expert",
        token_axes: Sequence[str] | None = None,
        config: MoEConfig = MoEConfig(),  # noqa: B008 (frozen)
        key: jax.Array,
    ) -> None:
        self.settings = _block.Settings(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            router=router,
            normalize=normalize,
            scale=scale,
            num_groups=num_groups,
            top_groups=top_groups,
            shared_intermediate=shared_intermediate,
            dtype=dtype,
            param_dtype=param_dtype,
            axis=axis,
            token_axes=token_axes,
            config=config,
        )
        _block.check_mesh(self.settings, None)
        self.router, self.experts, self.shared = _block.init(key, self.settings)
        self.selection_bias = _block.init_selection_bias(self.settings)

    def __call__(self, x: jax.Array, *, mesh: jax.sharding.Mesh | None = None) -> tuple[jax.Array, Aux]:
        """**Arguments**: ``x [..., H]``, any float dtype; ``mesh``, default the ambient one. Do not
        ``vmap`` over a batch: give it to the block as a leading dimension.

        **Returns** ``y``, shaped like ``x``, in ``dtype``; and :class:`Aux`.
        """
        weights = _block.Weights(self.router, self.experts, self.shared)
        return _block.apply(self.settings, weights, self.selection_bias, x, mesh)

    def update_bias(self, expert_load: jax.Array, rate: float = 1e-3) -> Self:
        """A block whose selection bias has moved one step against the load
        (:func:`jax_mok.router.update_selection_bias`); call it after each training step with ``aux.expert_load``.
        """
        if self.selection_bias is None:
            raise _block.no_selection_bias()
        bias = update_selection_bias(self.selection_bias, expert_load, rate)
        return eqx.tree_at(lambda block: block.selection_bias, self, bias)


def partition_specs(model: Any) -> Any:
    """A ``PartitionSpec`` for each array of a model, which may be or contain :class:`MoE` blocks: experts over the EP
    axis on their first dimension, everything else replicated; ``None`` for what is not an array. Models of
    ``jax.ShapeDtypeStruct`` (``eqx.filter_eval_shape``) will do. Replace what other layers want sharded with
    ``eqx.tree_at``.
    """

    def of_block(block: MoE) -> MoE:
        specs = _block.partition_specs(block.settings)
        return _with_leaves(block, *specs, None if block.selection_bias is None else PartitionSpec(None))

    return _map_blocks(of_block, lambda leaf: PartitionSpec() if hasattr(leaf, "shape") else None, model)


def shardings(model: Any, mesh: jax.sharding.Mesh) -> Any:
    """:func:`partition_specs` as ``NamedSharding`` on this mesh."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), partition_specs(model), is_leaf=lambda n: isinstance(n, PartitionSpec)
    )


def shard(model: Any, mesh: jax.sharding.Mesh) -> Any:
    """The model with its arrays placed by :func:`shardings`; like ``eqx.filter_shard``, and on meshes with Explicit
    axes too. A model that is too large for one device is built in its place by

        eqx.filter_jit(lambda key: shard(Model(key), mesh))(key)
    """
    arrays, rest = eqx.partition(model, eqx.is_array)
    # Each kind of axis has its own word for this inside jit, and ignores or refuses the other's.
    place = jax.device_put if AxisType.Explicit in mesh.axis_types else jax.lax.with_sharding_constraint
    return eqx.combine(place(arrays, shardings(arrays, mesh)), rest)


def trainable(model: Any) -> Any:
    """A filter for ``eqx.partition``: true for each floating-point array of a model except the selection biases of its
    :class:`MoE` blocks."""

    def of_block(block: MoE) -> MoE:
        router, experts, shared = jax.tree.map(eqx.is_inexact_array, (block.router, block.experts, block.shared))
        return _with_leaves(block, router, experts, shared, None if block.selection_bias is None else False)

    return _map_blocks(of_block, eqx.is_inexact_array, model)


def _map_blocks(of_block: Callable[[MoE], Any], of_leaf: Callable[[Any], Any], model: Any) -> Any:
    def is_block(node: Any) -> bool:
        return isinstance(node, MoE)

    return jax.tree.map(lambda node: of_block(node) if is_block(node) else of_leaf(node), model, is_leaf=is_block)


def _with_leaves(block: MoE, router: Any, experts: Any, shared: Any, selection_bias: Any) -> MoE:
    return eqx.tree_at(
        lambda b: (b.router, b.experts, b.shared, b.selection_bias),
        block,
        (router, experts, shared, selection_bias),
        is_leaf=lambda node: node is None,
    )
