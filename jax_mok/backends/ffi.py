"""The native backends: one foreign call forward, one backward. Pure calls; attributes are stable values only."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok import _varying, runtime
from jax_mok._call import Call
from jax_mok._config import Experts
from jax_mok.backends.collectives import RawStats
from jax_mok.runtime import cuda, processes

FORWARD = "jax_mok_forward"
BACKWARD = "jax_mok_backward"
_MAX_CUDA_EXPERTS = 1024
_CUDA_WIDTH = 8  # elements of 16 bytes


class Saved(NamedTuple):
    """What ``residuals="save"`` keeps: routed rows ``[R, H]``, gate and up ``[R, I]``; of the shared expert gate and
    up ``[T, I_s]``. ``R`` = row capacity, padding counted; only rows in use are written. ``None``: not kept. An array
    without elements would not do: XLA for GPUs crashes where one leaves a ``shard_map`` (JAX 0.11.2)."""

    rows: Any
    gate: Any
    up: Any
    shared_gate: Any
    shared_up: Any


def refusal(call: Call, backend: str, platform: str) -> str | None:
    """Why the native backend cannot run this call, or ``None`` if it can."""
    if backend != platform:
        return f"the {backend!r} kernels run on {backend} devices, and this call is placed on {platform!r}"
    if (why := runtime.load_error()) is not None:
        return why
    if call.span == processes.UNKNOWN:
        return (
            f"it cannot be told whether the {call.ranks} devices of axis {call.axis!r} are in one process; "
            "name the mesh with jax.set_mesh(mesh) around the call, or with jax_mok.moe(..., mesh=mesh)"
        )
    if call.axis is not None:
        mesh = jax.sharding.get_abstract_mesh()
        auto = [a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1]
        if auto:
            return f"mesh axes {auto} are not manual in the surrounding shard_map"
    return _cuda_refusal(call) if backend == "cuda" else None


def reservation(call: Call, backend: str) -> str | None:
    """Why ``backend="auto"`` does not choose the native backend although it could run the call, or ``None``."""
    if backend == "cuda" and call.ranks > 1:
        return (
            "the CUDA kernels' exchange has been tested between ranks that share one GPU, not between GPUs; ask for it "
            "by backend='cuda'"
        )
    return None


def _cuda_refusal(call: Call) -> str | None:
    if call.span == processes.ALL_DEVICES and call.ranks <= jax.local_device_count():
        return (
            f"it cannot be told whether each group of axis {call.axis!r} is in one process; name the mesh with "
            "jax.set_mesh(mesh) around the call, or with jax_mok.moe(..., mesh=mesh)"
        )
    if (why := processes.gpu_refusal(call.span)) is not None:
        return f"axis {call.axis!r} cannot be used between GPUs: {why}; give every group a part in the same processes"
    if call.ranks > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return "CUDA_LAUNCH_BLOCKING=1 lets no rank start before the one in front of it has ended; unset it"
    if call.tokens == 0:
        return "the CUDA kernels need at least one token"
    if call.dtype != "bfloat16":
        return f"the CUDA kernels compute in bfloat16, not {call.dtype}"
    if call.experts > _MAX_CUDA_EXPERTS:
        return f"{call.experts} experts are more than the CUDA kernels take ({_MAX_CUDA_EXPERTS})"
    if (why := cuda.refusal()) is not None:
        return why
    if call.ranks > 1 and (unlinked := cuda.unlinked()):
        return f"GPU {unlinked[0][0]} cannot read the memory of GPU {unlinked[0][1]} (no peer access between them)"
    return None


def _coordinates(call: Call, like: Any) -> Any:
    """int32 [2]: this rank's place in its EP group, and the group's number among the mesh's groups."""
    mesh = jax.sharding.get_abstract_mesh()
    rank, group = jnp.int32(0), jnp.int32(0)
    if call.axis is not None:
        rank = jax.lax.axis_index(call.axis).astype(jnp.int32)
        for axis in mesh.axis_names:
            if axis != call.axis:
                group = group * mesh.shape[axis] + jax.lax.axis_index(axis).astype(jnp.int32)
    axes = _varying.union_of((like, rank, group))
    return jnp.stack(_varying.vary_over((rank, group), axes))


def _attributes(call: Call) -> dict[str, Any]:
    """Everything the handlers need beyond shapes, in words a reader of the lowered program understands."""
    return {
        "hidden": np.int64(call.hidden),
        "inter": np.int64(call.inter),
        "shared_inter": np.int64(call.shared_inter),
        "tokens": np.int64(call.tokens),
        "top_k": np.int64(call.top_k),
        "ranks": np.int64(call.ranks),
        "devices": np.int64(max(jax.sharding.get_abstract_mesh().size, 1)),
        "experts": np.int64(call.experts),
        "max_rows": np.int64(call.max_rows),
        "timeout_s": np.float64(call.config.timeout_s),
        "first_call_timeout_s": np.float64(call.config.first_call_timeout_s),
        "residuals": call.config.residuals,
        "axis": "" if call.axis is None else str(call.axis),
        "mesh": ",".join(f"{name}={size}" for name, size in jax.sharding.get_abstract_mesh().shape.items()),
        "span": call.span,
    }


def _operands(call: Call, *groups: Any) -> list[Any]:
    """Flat operands that all vary over the same axes, as a foreign call requires; coordinates first."""
    leaves = jax.tree.leaves(groups)
    coords = _coordinates(call, leaves[0])
    return jax.tree.leaves(_varying.vary_over((coords, leaves), _varying.axes_of(coords)))


def _shared_or_empty(call: Call, shared: Experts | None, like: Any) -> Experts:
    if shared is not None:
        return shared
    wide = jnp.zeros((call.hidden, 0), like.dtype)
    return _varying.vary_over(Experts(wide, wide, wide.T), _varying.axes_of(like))


def _even_widths(
    call: Call, experts: Experts, shared: Experts, *tokens: Any
) -> tuple[Call, Experts, Experts, list[Any]]:
    """The same layer with H, I and I_s padded by zeros to multiples of 8, for kernels that move 16 bytes at a time.
    Costs a copy of the weights, and nothing where the widths already fit. ``tokens``: arrays ``[T, H]``."""

    def up(n: int) -> int:
        return -n % _CUDA_WIDTH

    def pad(w: Any, rows: int, columns: int) -> Any:
        return jnp.pad(w, [(0, 0)] * (w.ndim - 2) + [(0, up(rows)), (0, up(columns))]) if up(rows) or up(columns) else w

    def pad_experts(e: Experts, inter: int) -> Experts:
        return Experts(pad(e.gate, H, inter), pad(e.up, H, inter), pad(e.down, inter, H))

    H, inter, shared_inter = call.hidden, call.inter, call.shared_inter
    wide = dataclasses.replace(
        call, hidden=H + up(H), inter=inter + up(inter), shared_inter=shared_inter + up(shared_inter)
    )
    padded = [pad(a, call.tokens * _CUDA_WIDTH, H) for a in tokens]
    return wide, pad_experts(experts, inter), pad_experts(shared, shared_inter), padded


def forward(
    call: Call, backend: str, x: Any, expert_ids: Any, router_weights: Any, experts: Experts, shared: Any, *, save: bool
) -> tuple[Any, RawStats, Saved]:
    """Returns ``y [T, H]``, the stats, and the residuals (none unless ``save``). Weights are in the dtype of ``x``."""
    hidden = call.hidden
    shared = _shared_or_empty(call, shared, x)
    if backend == "cuda":
        call, experts, shared, [x] = _even_widths(call, experts, shared, x)
    rows = runtime.padded_rows(call, backend) if save else 0
    tokens = call.tokens if save else 0
    width = call.inter

    def out(*shape: int, dtype: Any = x.dtype) -> jax.ShapeDtypeStruct:
        return _varying.struct(shape, dtype, like=x)

    def agreed(*shape: int) -> jax.ShapeDtypeStruct:  # the same on every rank of the group
        return _varying.struct(shape, jnp.int32, like=x, without=(call.axis,))

    results = (
        out(call.tokens, call.hidden),
        agreed(call.experts),
        agreed(call.ranks),
        agreed(),
        out(rows, call.hidden),
        out(rows, width),
        out(rows, width),
        out(tokens, call.shared_inter),
        out(tokens, call.shared_inter),
        out(runtime.workspace_bytes(call, backend, save=save), dtype=jnp.uint8),
    )
    operands = _operands(call, x, expert_ids, router_weights, experts, shared)
    y, per_expert, rows_per_rank, status, *saved, _ = jax.ffi.ffi_call(FORWARD, results)(
        *operands, **_attributes(call), save=np.int64(save)
    )
    return y[:, :hidden], RawStats(per_expert, rows_per_rank, status), Saved(*(a if a.size else None for a in saved))


def backward(
    call: Call,
    backend: str,
    x: Any,
    expert_ids: Any,
    router_weights: Any,
    experts: Experts,
    shared: Experts | None,
    saved: Saved,
    dy: Any,
) -> tuple[Any, Any, Experts, Experts | None]:
    """Returns the gradients of ``x``, ``router_weights``, ``experts`` and ``shared``, those of weights in
    ``call.weight_dtype``. Weights are in the dtype of ``x``."""
    narrow = (x, router_weights, *experts, *_shared_or_empty(call, shared, x))
    wide_experts, wide_shared = experts, Experts(*narrow[5:])
    if backend == "cuda":
        call, wide_experts, wide_shared, [x, dy] = _even_widths(call, wide_experts, wide_shared, x, dy)
    save = saved.rows is not None
    empty = _varying.vary_over(jnp.zeros(0, x.dtype), _varying.axes_of(x))
    saved = Saved(*(empty if a is None else a for a in saved))
    workspace = jax.ShapeDtypeStruct((runtime.backward_bytes(call, backend, save=save),), jnp.uint8)
    weight_grads = [jax.ShapeDtypeStruct(w.shape, call.weight_dtype) for w in (*wide_experts, *wide_shared)]
    likes = (x, router_weights, *weight_grads, workspace)
    results = tuple(_varying.struct(a.shape, a.dtype, like=x) for a in likes)
    operands = _operands(call, x, expert_ids, router_weights, wide_experts, wide_shared, saved, dy)
    attributes = _attributes(call) | {"save": np.int64(save), "weight_grads": call.weight_dtype}
    *wide, _ = jax.ffi.ffi_call(BACKWARD, results)(*operands, **attributes)
    dx, dw, *grads = (g[tuple(map(slice, a.shape))] for g, a in zip(wide, narrow, strict=True))
    return dx, dw, Experts(*grads[:3]), None if shared is None else Experts(*grads[3:])
