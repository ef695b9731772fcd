"""The layer that a PyTorch user has without building anything: ``torch._grouped_mm`` on one GPU, on JAX's own arrays.

Nothing here imports torch before :func:`program` is called.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_mok import backends
from jax_mok._config import Experts
from jax_mok.cli.shape import Arrays
from jax_mok.cli.timing import Program

NAME = "torch"


def refusal(mesh: Mesh) -> str | None:
    """Why it cannot run on this mesh, or ``None``."""
    if backends.platform_of(mesh) != "cuda":
        return "needs an NVIDIA GPU"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if mesh.size > 1:
        return "one device only: with NCCL it needs one process per GPU"
    if not importlib.import_module("torch").cuda.is_available():
        return "this torch has no CUDA"
    return None


def program(arrays: Arrays, *, backward: bool) -> Program:
    """The layer on these arrays, which must be on one GPU; shared by dlpack, not copied. Results are ``y``, or
    ``(y, dx, d_router_weights, Experts(...))``."""
    torch: Any = importlib.import_module("torch")
    x, ids, weights, gate, up, down, dy = (
        torch.from_dlpack(a) for a in (arrays.x, arrays.expert_ids, arrays.router_weights, *arrays.experts, arrays.dy)
    )
    wanted = [tensor.requires_grad_(backward) for tensor in (x, weights, gate, up, down)]

    def run() -> Any:
        with torch.set_grad_enabled(backward):
            y = _layer(torch, x, ids, weights, Experts(gate, up, down))
        if not backward:
            return y
        dx, d_weights, *d_experts = torch.autograd.grad(y, wanted, dy)
        return y.detach(), dx, d_weights, Experts(*d_experts)

    def call() -> Any:
        result, done = run(), torch.cuda.Event()
        done.record()
        return result, done

    def to_jax(started: Any) -> Any:
        torch.cuda.synchronize()
        return jax.tree.map(lambda t: jnp.from_dlpack(t.contiguous()), started[0])

    return Program(call, lambda started: started[1].synchronize(), to_jax)


def _layer(torch: Any, x: Any, ids: Any, router_weights: Any, experts: Experts) -> Any:
    (tokens, hidden), top_k, num_experts = x.shape, ids.shape[1], experts.gate.shape[0]
    key = torch.where(ids < 0, num_experts, ids).reshape(-1)
    slots = torch.argsort(key, stable=True)
    ends = torch.bincount(key, minlength=num_experts + 1)[:num_experts].cumsum(0).to(torch.int32)
    used = (torch.arange(tokens * top_k, device=x.device) < ends[-1])[:, None]

    by_slot = x[:, None].expand(tokens, top_k, hidden).reshape(tokens * top_k, hidden)
    rows = torch.where(used, by_slot.index_select(0, slots), 0)
    gate = torch._grouped_mm(rows, experts.gate, offs=ends)
    up = torch._grouped_mm(rows, experts.up, offs=ends)
    out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, experts.down, offs=ends)
    by_slot = torch.zeros_like(out).index_copy(0, slots, torch.where(used, out, 0))
    # Weighted in float32, as torchtitan does.
    y = torch.bmm(router_weights[:, None], by_slot.reshape(tokens, top_k, hidden).float())
    return y[:, 0].to(x.dtype)
