"""The static description of one local call, and the checks that make it: every bad shape or dtype ends here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jax_mok._config import Experts, MoEConfig

MAX_RANKS = 1024
MAX_SLOTS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes of one rank's call. ``tokens`` is per rank; ``experts`` is over the whole EP group."""

    tokens: int
    hidden: int
    inter: int
    shared_inter: int  # 0 = no shared expert
    experts: int
    top_k: int
    ranks: int
    dtype: str  # of x, in which the layer computes
    weight_dtype: str  # of the weights and their gradients: dtype, or float32 (master weights)
    axis: Hashable | None  # name of the EP mesh axis; None = no group
    config: MoEConfig
    span: str = ""  # names EP groups that span processes (runtime/processes.py); "" = every group is in one process

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def max_rows(self) -> int:
        """Routed rows that one rank may receive."""
        worst = self.ranks * self.tokens * self.top_k
        if self.config.capacity_factor is None:
            return worst
        return min(worst, math.ceil(self.config.capacity_factor * self.tokens * self.top_k))


def _describe(x: Any) -> str:
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


def check_experts(name: str, experts: Any, hidden: int, *, shared: bool) -> tuple[int, int]:
    """Checks the weights' shapes and returns (number of experts, intermediate width)."""
    if not (isinstance(experts, tuple) and len(experts) == 3):
        raise TypeError(
            f"{name} must be mok.Experts(gate, up, down), got {type(experts).__name__}. "
            "Pass the three weight arrays as jax_mok.Experts."
        )
    gate, up, down = experts
    lead = "" if shared else "E, "
    rank = 2 if shared else 3
    wanted = f"gate, up [{lead}H, I] and down [{lead}I, H] with H = {hidden}"
    if not all(w.ndim == rank for w in experts) or gate.shape[-2] != hidden:
        got = ", ".join(_describe(w) for w in experts)
        raise ValueError(f"{name} needs {wanted}; got gate, up, down = {got}.")
    if up.shape != gate.shape or down.shape != (*gate.shape[:-2], gate.shape[-1], gate.shape[-2]):
        got = ", ".join(_describe(w) for w in experts)
        raise ValueError(f"{name} needs {wanted}, all with the same E and I; got gate, up, down = {got}.")
    return (1 if shared else gate.shape[0]), gate.shape[-1]


def weight_dtype(x: Any, experts: Experts, shared: Experts | None) -> str:
    """The one dtype of all weights: that of ``x``, or float32 master weights under a bfloat16 ``x``."""
    groups = {"experts": experts} if shared is None else {"experts": experts, "shared": shared}
    first = experts[0].dtype
    wanted = first if first in (x.dtype, jnp.float32) else x.dtype
    for group, weights in groups.items():
        for field, w in zip(Experts._fields, weights, strict=True):
            if w.dtype != wanted:
                raise TypeError(
                    f"{group}.{field} is {jnp.dtype(w.dtype).name} but x is {jnp.dtype(x.dtype).name} and experts.gate "
                    f"{jnp.dtype(first).name}. All weights have one dtype: that of x, or float32, of which the call "
                    f"makes copies in the dtype of x. Cast: {group}.{field}.astype(jnp.{jnp.dtype(wanted).name})."
                )
    return jnp.dtype(wanted).name


def check_tokens(x: Any, expert_ids: Any, router_weights: Any) -> None:
    """Checks the per-token arrays, local or global."""
    if x.ndim < 1:
        raise ValueError(f"x must be [..., H], got {_describe(x)}.")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(
            f"x is {jnp.dtype(x.dtype).name}; the layer computes in bfloat16 (or float32). "
            "Cast it: x.astype(jnp.bfloat16). float16 is not supported: its range overflows in the expert MLP."
        )
    if expert_ids.dtype != jnp.int32:
        raise TypeError(
            f"expert_ids is {jnp.dtype(expert_ids.dtype).name}; it must be int32: expert_ids.astype(jnp.int32)."
        )
    if router_weights.dtype != jnp.float32:
        raise TypeError(
            f"router_weights is {jnp.dtype(router_weights.dtype).name}; it must be float32: "
            "router_weights.astype(jnp.float32)."
        )
    if expert_ids.ndim != x.ndim or expert_ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"expert_ids must be [..., K] with the leading dimensions of x; got expert_ids {_describe(expert_ids)} "
            f"and x {_describe(x)}."
        )
    if router_weights.shape != expert_ids.shape:
        raise ValueError(
            f"router_weights must have the shape of expert_ids, {list(expert_ids.shape)}; "
            f"got {_describe(router_weights)}."
        )
    if expert_ids.shape[-1] < 1:
        raise ValueError(f"expert_ids needs at least one slot per token (K >= 1), got {_describe(expert_ids)}.")


def make_call(
    x: Any,
    expert_ids: Any,
    router_weights: Any,
    experts: Any,
    shared: Any,
    axis: Hashable | None,
    config: MoEConfig,
    span: str = "",
) -> Call:
    """Checks one rank's local arrays (``x [T, H]``) and returns their static description."""
    if not isinstance(config, MoEConfig):
        raise TypeError(f"config must be a jax_mok.MoEConfig, got {type(config).__name__}.")
    check_tokens(x, expert_ids, router_weights)
    tokens, hidden = x.shape
    local, inter = check_experts("experts", experts, hidden, shared=False)
    shared_inter = 0 if shared is None else check_experts("shared", shared, hidden, shared=True)[1]
    ranks = 1 if axis is None else jax.lax.axis_size(axis)
    if hidden < 1 or inter < 1 or local < 1:
        raise ValueError(f"E, H and I must be at least 1; got {local * ranks} experts, H = {hidden}, I = {inter}.")
    if shared is not None and shared_inter < 1:
        raise ValueError("shared has width I_s = 0; pass shared=None for a layer without a shared expert.")
    if ranks > MAX_RANKS:
        raise ValueError(f"The EP axis {axis!r} has {ranks} ranks; at most {MAX_RANKS} are supported.")
    if ranks * tokens * expert_ids.shape[-1] > MAX_SLOTS:
        raise ValueError(
            f"{ranks} ranks x {tokens} tokens x top-{expert_ids.shape[-1]} are more than 2**31 - 1 slots in one call; "
            "split the batch (for example with jax.lax.scan over microbatches)."
        )
    return Call(
        tokens=tokens,
        hidden=hidden,
        inter=inter,
        shared_inter=shared_inter,
        experts=local * ranks,
        top_k=expert_ids.shape[-1],
        ranks=ranks,
        dtype=jnp.dtype(x.dtype).name,
        weight_dtype=weight_dtype(x, experts, shared),
        axis=axis,
        config=config,
        span=span if ranks > 1 else "",
    )
