"""Fused, deterministic mixture-of-experts layers for JAX. The public names; see :func:`moe` first."""

from jax_mok._api import Stats, local_moe, moe
from jax_mok._config import Experts, MoEConfig
from jax_mok._errors import (
    CapacityError,
    MoEError,
    PeerDiedError,
    PeerFailedError,
    PeerTimeoutError,
    RoutingError,
    ShapeMismatchError,
    as_typed,
    typed_errors,
)
from jax_mok._inspect import inspect
from jax_mok._op import RESIDUAL_NAMES
from jax_mok._version import __version__

__all__ = [
    "RESIDUAL_NAMES",
    "CapacityError",
    "Experts",
    "MoEConfig",
    "MoEError",
    "PeerDiedError",
    "PeerFailedError",
    "PeerTimeoutError",
    "RoutingError",
    "ShapeMismatchError",
    "Stats",
    "__version__",
    "as_typed",
    "inspect",
    "local_moe",
    "moe",
    "typed_errors",
]
