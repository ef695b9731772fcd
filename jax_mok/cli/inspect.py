"""Compiles one layer for given shapes."""

from __future__ import annotations

from typing import Any

import jax

import jax_mok as mok
from jax_mok.cli.shape import Arrays, Shape
from jax_mok.demo import devices


def compile_layer(shape: Shape, config: mok.MoEConfig, *, backward: bool) -> jax.stages.Compiled:
    """The layer's forward pass, or with ``backward`` the program that also computes all its gradients."""
    devices.request(shape.ranks)
    mesh = devices.expert_mesh(shape.ranks)

    def with_gradients(a: Arrays) -> Any:
        def layer(x: Any, router_weights: Any, experts: Any, shared: Any) -> jax.Array:
            return mok.moe(x, a.expert_ids, router_weights, experts, shared=shared, mesh=mesh, config=config)

        y, pullback = jax.vjp(layer, a.x, a.router_weights, a.experts, a.shared)
        return y, pullback(a.dy)

    def forward(a: Arrays) -> jax.Array:
        return mok.moe(a.x, a.expert_ids, a.router_weights, a.experts, shared=a.shared, mesh=mesh, config=config)

    return jax.jit(with_gradients if backward else forward).lower(shape.abstract(mesh)).compile()
