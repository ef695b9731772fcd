"""A mixture-of-experts block for Flax: :class:`MoE`, an NNX module. In Linen, wrap it in Flax's own bridge:
``nnx.bridge.to_linen(MoE, hidden=..., ...)``.

    block = MoE(hidden=2048, intermediate=768, num_experts=128, top_k=8, rngs=nnx.Rngs(0))
    y, aux = block(x)
    loss = task_loss(y) + 0.01 * aux.load_balancing_loss
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import PartitionSpec

from jax_mok import _block
from jax_mok._block import Aux, Router
from jax_mok._config import Experts, MoEConfig
from jax_mok.router import update_selection_bias

__all__ = ["Aux", "ExpertWeights", "MoE", "SelectionBias"]


class SelectionBias(nnx.Variable[jax.Array]):
    """State of a sigmoid router, moved by :meth:`MoE.update_bias`. Not an ``nnx.Param``, so gradients and optimizers
    pass it by. Its Linen collection is ``"moe_selection_bias"``."""


nnx.register_variable_name("moe_selection_bias", SelectionBias, overwrite=True)  # again when reloaded


class ExpertWeights(nnx.Module):
    """``gate``, ``up`` and ``down`` of the routed experts or of the shared one, as ``nnx.Param``."""

    def __init__(self, gate: nnx.Param[jax.Array], up: nnx.Param[jax.Array], down: nnx.Param[jax.Array]) -> None:
        self.gate = gate
        self.up = up
        self.down = down

    def arrays(self) -> Experts:
        return Experts(self.gate[...], self.up[...], self.down[...])


class MoE(nnx.Module):
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
    - ``mesh``: default the ambient mesh (``jax.set_mesh``).
    - ``axis``: mesh axis of the EP group; ``None`` = every device holds all experts.
    - ``token_axes``: mesh axes that the first dimension of ``x`` is sharded over, as in :func:`jax_mok.moe`.
    - ``config``: :class:`jax_mok.MoEConfig`.
    - ``rngs``: the stream ``params`` is used, in the constructor only.

    **Parameters**: ``router [H, E]``; ``experts.gate``, ``experts.up`` ``[E, H, I]``, ``experts.down [E, I, H]``;
    ``shared.gate``, ``shared.up`` ``[H, I_s]``, ``shared.down [I_s, H]``; and, not a parameter, ``selection_bias [E]``.
    They carry Flax's sharding metadata (``out_sharding``), the experts over ``axis`` and the rest replicated, for
    ``nnx.get_partition_spec``, ``nnx.get_named_sharding`` and Linen's ``get_partition_spec``. With a mesh at
    construction, given or ambient, they are placed so at once, as ``nnx.use_eager_sharding`` says.

    **Raises** ``ValueError`` where ``E`` is not a multiple of the size of ``axis``, at construction when the mesh is
    known by then, else in the call; and for sizes and names that do not fit.
    """

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
        mesh: jax.sharding.Mesh | None = None,
        axis: str | None = "expert",
        token_axes: Sequence[str] | None = None,
        config: MoEConfig = MoEConfig(),  # noqa: B008 (frozen)
        rngs: nnx.Rngs,
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
        self.mesh = mesh
        # In Linen the annotation is then Linen's own box, which nn.scan and nn.vmap know how to stack.
        metadata: dict[str, Any] = {"linen_meta_type": linen.Partitioned}
        if mesh is not None:
            metadata["mesh"] = mesh
        # Without a mesh Flax refuses to place an annotated variable; the annotation is wanted all the same.
        if _block.check_mesh(self.settings, mesh) is None:
            metadata["eager_sharding"] = False

        def param(value: jax.Array, spec: PartitionSpec) -> nnx.Param[jax.Array]:
            return nnx.Param(value, out_sharding=tuple(spec), **metadata)

        def expert_weights(values: Experts, specs: Experts) -> ExpertWeights:
            return ExpertWeights(*map(param, values, specs))

        weights, specs = _block.init(rngs.params(), self.settings), _block.partition_specs(self.settings)
        self.router = param(weights.router, specs.router)
        self.experts = expert_weights(weights.experts, specs.experts)
        shared = None
        if weights.shared is not None and specs.shared is not None:
            shared = expert_weights(weights.shared, specs.shared)
        self.shared = shared
        bias = _block.init_selection_bias(self.settings)
        self.selection_bias = None if bias is None else SelectionBias(bias, out_sharding=(None,), **metadata)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Aux]:
        """**Arguments**: ``x [..., H]``, any float dtype.

        **Returns** ``y``, shaped like ``x``, in ``dtype``; and :class:`Aux`.
        """
        weights = _block.Weights(
            self.router[...], self.experts.arrays(), None if self.shared is None else self.shared.arrays()
        )
        bias = None if self.selection_bias is None else self.selection_bias[...]
        return _block.apply(self.settings, weights, bias, x, self.mesh)

    def update_bias(self, expert_load: jax.Array, rate: float = 1e-3) -> None:
        """Moves the selection bias one step against the load (:func:`jax_mok.router.update_selection_bias`); call it
        after each training step with ``aux.expert_load``. In Linen:
        ``block.apply(variables, load, nnx_method="update_bias", mutable=["moe_selection_bias"])``.
        """
        if self.selection_bias is None:
            raise _block.no_selection_bias()
        self.selection_bias.set_value(update_selection_bias(self.selection_bias[...], expert_load, rate))
