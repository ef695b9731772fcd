"""Digests that show whether two computations gave the same bits."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jax_mok as mok
from jax_mok.backends import ffi
from jax_mok.demo.task import RoutedCall


def digest(tree: Any) -> str:
    """sha256 over path, dtype, shape and bytes of every leaf. With several processes, all must call it."""
    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(multihost_utils.process_allgather(tree, tiled=True)):
        array = np.ascontiguousarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


class GradientDigests(NamedTuple):
    """Of one ``mok.moe`` call at one EP size: a digest per array, and whether the native kernels ran it."""

    digests: dict[str, str]
    native: bool


@functools.partial(jax.jit, static_argnames=("mesh", "config"))
def _gradients(call: RoutedCall, dy: jax.Array, *, mesh: Mesh, config: mok.MoEConfig) -> dict[str, jax.Array]:
    def layer(x: jax.Array, router_weights: jax.Array, experts: mok.Experts) -> jax.Array:
        return mok.moe(x, call.expert_ids, router_weights, experts, mesh=mesh, config=config)

    y, pullback = jax.vjp(layer, call.x, call.router_weights, call.experts)
    dx, dw, d_experts = pullback(dy)
    return {"y": y, "dx": dx, "d_router_weights": dw, **{f"d_{name}": d for name, d in d_experts._asdict().items()}}


def routed_gradients(call: RoutedCall, mesh: Mesh, config: mok.MoEConfig) -> GradientDigests:
    """Digests of output and gradients of ``call`` (host arrays, the whole batch) on the EP group of ``mesh``, for one
    fixed cotangent."""
    dy = jax.random.normal(jax.random.key(0), call.x.shape, jnp.float32).astype(call.x.dtype)
    native = ffi.BACKWARD in _gradients.lower(call, dy, mesh=mesh, config=config).as_text()
    with mok.typed_errors():
        results = jax.block_until_ready(_gradients(call, dy, mesh=mesh, config=config))
    return GradientDigests({name: digest(value) for name, value in results.items()}, native)
