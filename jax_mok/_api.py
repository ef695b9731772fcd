"""The public calls: :func:`moe` on global arrays, :func:`local_moe` inside a ``shard_map``."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok import _op, _varying, backends
from jax_mok._call import check_experts, check_tokens, make_call
from jax_mok._config import Experts, MoEConfig
from jax_mok._mesh import ambient_mesh, check_experts_divide, check_token_axes
from jax_mok.runtime import processes


class Stats(NamedTuple):
    """What the call did, for the whole batch. Not differentiable.

    - ``tokens_per_expert``: int32 ``[E]``, slots routed to each expert.
    - ``rows_per_rank``: int32 ``[P]``, rows that each EP rank received (the largest over the other token axes), the
      figure that ``MoEConfig.capacity_factor`` bounds.
    - ``status``: int32 scalar, 0 = ok. The native backends raise on a failure; ``"xla"`` and ``"reference"`` cannot,
      so they return NaN for ``y`` and 1 (an expert id out of range) or 2 (over capacity) here.
    """

    tokens_per_expert: jax.Array
    rows_per_rank: jax.Array
    status: jax.Array


@overload
def local_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    experts: Experts,
    shared: Experts | None = ...,
    *,
    axis: Hashable | None = ...,
    config: MoEConfig = ...,
    with_stats: Literal[False] = ...,
) -> jax.Array: ...
@overload
def local_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    experts: Experts,
    shared: Experts | None = ...,
    *,
    axis: Hashable | None = ...,
    config: MoEConfig = ...,
    with_stats: Literal[True],
) -> tuple[jax.Array, Stats]: ...


def local_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    experts: Experts,
    shared: Experts | None = None,
    *,
    axis: Hashable | None = "expert",
    config: MoEConfig = MoEConfig(),  # noqa: B008 (frozen)
    with_stats: bool = False,
) -> Any:
    """The MoE layer on one rank's shards, inside the caller's own ``shard_map``.

    **Arguments**

    - ``x``: this rank's tokens, ``[..., H]``, bfloat16 (float32 too on the CPU, XLA and reference backends).
    - ``expert_ids``: int32 ``[..., K]``, global expert numbers ``0 .. E-1``; -1 = no expert (contributes nothing,
      gets zero gradients). The same id twice in a token counts twice.
    - ``router_weights``: float32 ``[..., K]``.
    - ``experts``: this rank's :class:`Experts`, ``E / P`` of them: rank ``r`` of ``axis`` owns experts
      ``r * E/P .. (r+1) * E/P - 1``. In the dtype of ``x``, or float32 master weights (see :func:`moe`).
    - ``shared``: weights of an expert that every token visits (own width, same dtype), or ``None``.
    - ``axis``: mesh axis of the EP group; ``None`` = no group (``P = 1``, also outside any ``shard_map``).
    - ``config``: :class:`MoEConfig`.
    - ``with_stats``: also return :class:`Stats` of this rank's EP group.

    Every mesh axis must be manual in the ``shard_map``. With ``check_vma=True`` gradients of weights that are
    replicated over an axis are summed over it by JAX; with ``check_vma=False`` each rank gets its own part and the
    sum (``jax.lax.psum``) is the caller's.

    **Returns** ``y`` like ``x``, or ``(y, Stats)``.

    **Raises** ``TypeError`` and ``ValueError`` at trace time for dtypes and shapes that do not fit,
    ``NotImplementedError`` for a backend that cannot run the call; at run time see :class:`MoEError`.
    """
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    if axis is not None and axis not in manual:
        raise ValueError(
            f"axis {axis!r} is not a manual axis of the surrounding shard_map (manual axes: "
            f"{sorted(map(str, manual))}). Call local_moe inside jax.shard_map over that axis, use jax_mok.moe on "
            "global arrays, or pass axis=None for P = 1."
        )
    mesh = ambient_mesh()
    platform, span = backends.platform_of(mesh), processes.span_of(mesh, axis)
    return _local_moe(x, expert_ids, router_weights, experts, shared, axis, config, with_stats, platform, span)


def _local_moe(
    x: Any,
    expert_ids: Any,
    router_weights: Any,
    experts: Any,
    shared: Any,
    axis: Hashable | None,
    config: MoEConfig,
    with_stats: bool,
    platform: str,
    span: str,
) -> Any:
    check_tokens(x, expert_ids, router_weights)
    lead, hidden = x.shape[:-1], x.shape[-1]
    tokens = math.prod(lead)
    top_k = expert_ids.shape[-1]
    x_flat = x.reshape(tokens, hidden)
    ids, weights = expert_ids.reshape(tokens, top_k), router_weights.reshape(tokens, top_k)
    call = make_call(x_flat, ids, weights, experts, shared, axis, config, span)
    args = (x_flat, ids, weights, experts, shared)
    args = _varying.vary_over(args, _varying.union_of(args))
    y, stats = _op.apply(call, backends.select(call, platform), args)
    y = y.reshape(x.shape)
    return (y, Stats(*stats)) if with_stats else y


@overload
def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    experts: Experts,
    *,
    shared: Experts | None = ...,
    mesh: jax.sharding.Mesh | None = ...,
    axis: str | None = ...,
    token_axes: Sequence[str] | None = ...,
    config: MoEConfig = ...,
    with_stats: Literal[False] = ...,
) -> jax.Array: ...
@overload
def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    experts: Experts,
    *,
    shared: Experts | None = ...,
    mesh: jax.sharding.Mesh | None = ...,
    axis: str | None = ...,
    token_axes: Sequence[str] | None = ...,
    config: MoEConfig = ...,
    with_stats: Literal[True],
) -> tuple[jax.Array, Stats]: ...


def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    experts: Experts,
    *,
    shared: Experts | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axis: str | None = "expert",
    token_axes: Sequence[str] | None = None,
    config: MoEConfig = MoEConfig(),  # noqa: B008 (frozen)
    with_stats: bool = False,
) -> Any:
    """A mixture-of-experts layer on global arrays, inside or outside ``jit``: dispatch, expert MLPs and combine in
    one custom call per device, and one more for all gradients.

        y_t = sum_k w_tk * f_{e_tk}(x_t) + f_shared(x_t),    f(x) = (silu(x W_g) * (x W_u)) W_d

    **Arguments**

    - ``x``: tokens ``[..., H]``, bfloat16 (float32 too on the CPU, XLA and reference backends).
    - ``expert_ids``: int32 ``[..., K]``; -1 = no expert.
    - ``router_weights``: float32 ``[..., K]``.
    - ``experts``: :class:`Experts` with ``gate, up [E, H, I]``, ``down [E, I, H]``, in the dtype of ``x``, or float32
      master weights; sharded over ``axis`` on the first dimension.
    - ``shared``: :class:`Experts` with ``gate, up [H, I_s]``, ``down [I_s, H]``, in the dtype of ``experts``,
      replicated; or ``None``.
    - ``mesh``: default the ambient mesh (``jax.set_mesh``). Without one the layer runs on one device.
    - ``axis``: mesh axis of the EP group, of size ``P``; ``None`` = every device holds all experts.
    - ``token_axes``: mesh axes over which the first dimension of ``x`` is sharded; must contain ``axis``. Default:
      ``("data", axis)``, as far as the mesh has them. Over the other axes the work is replicated.
    - ``config``: :class:`MoEConfig`.
    - ``with_stats``: also return :class:`Stats`.

    Arrays with another sharding are resharded. Reverse-mode gradients for ``x``, ``router_weights``, ``experts`` and
    ``shared``, in their dtypes, accumulated in float32 and rounded once. For the same global batch the output and every
    routed gradient have the same bits for any ``P``.

    **Master weights.** Float32 weights under a bfloat16 ``x`` need no cast: the call makes bfloat16 copies, once, and
    keeps them for its backward pass (under ``jax.checkpoint`` it makes them again). Their gradients are the float32
    sums, never rounded. All else has the bits of a call on ``weights.astype(jnp.bfloat16)``.

    **Returns** ``y`` like ``x``, or ``(y, Stats)``.

    **Raises** at trace time ``TypeError`` and ``ValueError`` for dtypes, shapes and shardings that do not fit, and
    ``NotImplementedError`` under ``vmap``, ``jvp`` and second derivatives; at run time see :class:`MoEError`.
    """
    mesh = mesh if mesh is not None else ambient_mesh()
    check_tokens(x, expert_ids, router_weights)
    num_experts, _ = check_experts("experts", experts, x.shape[-1], shared=False)
    if mesh is None:
        platform = backends.platform_of(None)
        return _local_moe(x, expert_ids, router_weights, experts, shared, None, config, with_stats, platform, "")

    token_axes = check_token_axes(mesh, axis, token_axes)
    check_experts_divide(mesh, axis, num_experts)
    shards = math.prod(mesh.shape[a] for a in token_axes)
    tokens = math.prod(x.shape[:-1])
    if tokens % shards:
        raise ValueError(
            f"{tokens} tokens (x {list(x.shape)}) cannot be spread evenly over the {shards} devices of mesh axes "
            f"{token_axes}. Pad the batch to a multiple of {shards} (padding tokens with expert_ids = -1 cost nothing)."
        )
    shape = x.shape
    flatten = x.ndim < 2 or x.shape[0] % shards != 0
    if flatten:  # Explicit axes cannot follow a sharding through these reshapes: gather first
        x, expert_ids, router_weights = _reshard((x, expert_ids, router_weights), (P(), P(), P()), mesh)
        x, expert_ids, router_weights = (a.reshape(tokens, a.shape[-1]) for a in (x, expert_ids, router_weights))

    by_token, by_expert = P(token_axes or None), P(axis)
    specs = (by_token, by_token, by_token, Experts(*[by_expert] * 3), None if shared is None else Experts(*[P()] * 3))
    args = _reshard((x, expert_ids, router_weights, experts, shared), specs, mesh)
    platform, span = backends.platform_of(mesh), processes.span_of(mesh, axis)

    def local(x: Any, expert_ids: Any, router_weights: Any, experts: Any, shared: Any) -> tuple[jax.Array, Stats]:
        y, stats = _local_moe(x, expert_ids, router_weights, experts, shared, axis, config, True, platform, span)
        other = tuple(a for a in token_axes if a != axis)
        if other:
            stats = Stats(
                jax.lax.psum(stats.tokens_per_expert, other),
                jax.lax.pmax(stats.rows_per_rank, other),
                jax.lax.pmax(stats.status, other),
            )
        return y, stats

    y, stats = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(by_token, P()))(*args)
    if flatten:
        y = _reshard(y, P(), mesh).reshape(shape)
    return (y, stats) if with_stats else y


def _reshard(args: Any, specs: Any, mesh: Any) -> Any:
    """Explicit mesh axes want their shardings spelled out; on Auto axes ``shard_map`` reshards by itself."""
    if AxisType.Explicit not in mesh.axis_types:
        return args
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
    return jax.tree.map(jax.reshard, args, shardings)
