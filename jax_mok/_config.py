"""What a caller configures: the weights of the experts and how the layer runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

Backend = Literal["auto", "cuda", "cpu", "xla", "reference"]
Residuals = Literal["save", "recompute"]


class Experts(NamedTuple):
    """SwiGLU weights, ``down(silu(x @ gate) * (x @ up))``, in JAX's natural ``x @ w`` layout.

    **Fields** (routed experts; a shared expert has the same without the leading ``E``):

    - ``gate``, ``up``: ``[E, H, I]``
    - ``down``: ``[E, I, H]``
    """

    gate: Any
    up: Any
    down: Any


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """How the layer runs. Frozen and hashable, so it can be a static argument or a static module field.

    **Arguments**

    - ``backend``: ``"auto"`` takes the fused kernel of the devices at hand and ``"xla"`` where there is none that has
      passed its tests, saying so once; ``"cuda"`` and ``"cpu"`` ask for the fused kernels of GPUs and of CPU devices.
      ``"xla"`` is ``ragged_dot`` and XLA's collectives, on any platform. ``"reference"`` is the dense definition of the
      layer, for tests.
    - ``residuals``: ``"save"`` keeps the routed rows, gate and up for the backward pass; ``"recompute"`` keeps
      nothing beyond the inputs and computes them again. Same bits either way.
    - ``capacity_factor``: a rank may receive at most ``ceil(capacity_factor * T * K)`` rows, ``T`` its own tokens;
      more is a :class:`CapacityError` on every rank, never a silent drop. ``None`` (default) makes room for the
      worst case, all tokens of the group on one rank, so the layer is dropless; the buffers then take up to ``P``
      times the balanced size.
    - ``timeout_s``: seconds without a sign of life after which a rank gives up on a peer
      (:class:`PeerTimeoutError` on every rank).
    - ``first_call_timeout_s``: the same, in an EP group that spans processes, for peers to arrive at the first call of
      each compiled program, which they may still be compiling.

    **Raises** ``ValueError`` for a value outside these.
    """

    backend: Backend = "auto"
    residuals: Residuals = "save"
    capacity_factor: float | None = None
    timeout_s: float = 60.0
    first_call_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, allowed in (("backend", get_args(Backend)), ("residuals", get_args(Residuals))):
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(f"MoEConfig.{name} is {given!r}; it must be one of {', '.join(map(repr, allowed))}.")
        for name in ("capacity_factor", "timeout_s", "first_call_timeout_s"):
            given = getattr(self, name)
            if name == "capacity_factor" and given is None:
                continue
            if not (isinstance(given, int | float) and math.isfinite(given) and given > 0):
                raise ValueError(f"MoEConfig.{name} is {given!r}; it must be a finite number greater than 0.")
        for name in ("timeout_s", "first_call_timeout_s"):
            if (given := getattr(self, name)) > 86400:
                raise ValueError(f"MoEConfig.{name} is {given!r}; it must be at most 86400 seconds.")
