"""One call as a differentiable operation: a ``custom_vjp`` around the native backends, plain JAX for the others."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_mok import _guard, _varying
from jax_mok._call import Call
from jax_mok._config import Experts
from jax_mok.backends import ffi, reference, xla
from jax_mok.backends.collectives import RawStats

RESIDUAL_NAMES: Final = ("jax_mok_output", "jax_mok_rows", "jax_mok_gate", "jax_mok_up")
"""Names of what the forward pass leaves for the backward pass, for
``jax.checkpoint_policies.save_only_these_names(*jax_mok.RESIDUAL_NAMES)``: with all of them saved (and
``residuals="save"``), ``jax.checkpoint`` does not run the layer's forward call a second time."""

_OUTPUT, _ROWS, _GATE, _UP = RESIDUAL_NAMES


def apply(call: Call, backend: str, args: tuple[Any, Any, Any, Experts, Experts | None]) -> tuple[jax.Array, RawStats]:
    """Runs the call on the chosen backend. ``args`` = x, expert_ids, router_weights, experts, shared; all vary over the
    same mesh axes."""
    if backend == "reference":
        return reference.run(call, *args)
    if backend == "xla":
        return xla.run(call, *args)
    result: Any = _native_moe(call, backend, *_guard.reverse_mode_only(args))
    y, stats = result
    return y, _guard.constant(stats)


def _in_dtype(dtype: Any, weights: Any) -> Any:
    """The weights as the kernels read them: master weights are cast, others are as they are."""
    return jax.tree.map(lambda w: w.astype(dtype), weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _native_moe(
    call: Call, backend: str, x: Any, expert_ids: Any, router_weights: Any, experts: Experts, shared: Experts | None
) -> tuple[jax.Array, RawStats]:
    experts, shared = _in_dtype(x.dtype, (experts, shared))
    y, stats, _ = ffi.forward(call, backend, x, expert_ids, router_weights, experts, shared, save=False)
    return y, stats


def _forward(
    call: Call, backend: str, x: Any, expert_ids: Any, router_weights: Any, experts: Experts, shared: Experts | None
) -> tuple[Any, Any]:
    x, expert_ids, router_weights, experts, shared = _guard.first_order_only(
        (x, expert_ids, router_weights, experts, shared)
    )
    # These become residuals, so that the backward pass need not cast the weights again.
    experts, shared = _in_dtype(x.dtype, (experts, shared))
    save = call.config.residuals == "save"
    y, stats, saved = ffi.forward(call, backend, x, expert_ids, router_weights, experts, shared, save=save)
    y = checkpoint_name(y, _OUTPUT)
    if save:
        names = ffi.Saved(rows=_ROWS, gate=_GATE, up=_UP, shared_gate=_GATE, shared_up=_UP)
        named = (a if a is None else checkpoint_name(a, name) for a, name in zip(saved, names, strict=True))
        saved = ffi.Saved(*named)
    return (y, stats), (x, expert_ids, router_weights, experts, shared, saved)


def _backward(call: Call, backend: str, residuals: Any, cotangents: Any) -> Any:
    x, expert_ids, router_weights, experts, shared, saved = residuals
    dy, _ = cotangents
    dy = _varying.vary_over(dy, _varying.axes_of(x))
    args = _guard.first_order_only((x, expert_ids, router_weights, experts, shared, saved, dy))
    dx, dw, d_experts, d_shared = ffi.backward(call, backend, *args)
    return dx, None, dw, d_experts, d_shared


_native_moe.defvjp(_forward, _backward)
