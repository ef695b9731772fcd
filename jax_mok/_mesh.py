"""The mesh of a call: which one, which of its axes, and whether the experts fit on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

_DATA_AXIS = "data"


def ambient_mesh() -> Any:
    """The mesh of ``jax.set_mesh`` (abstract, so that it is there inside ``jit`` too), or ``None``."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def check_token_axes(mesh: Any, axis: str | None, token_axes: Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes over which tokens are sharded. Raises ``ValueError`` for names that the mesh does not have."""
    names = tuple(mesh.axis_names)
    if axis is not None and axis not in names:
        raise ValueError(
            f"The mesh has no axis {axis!r}; its axes are {names}. Name the EP axis with axis=..., or pass axis=None "
            "to keep all experts on every device."
        )
    if token_axes is None:
        return tuple(a for a in (_DATA_AXIS, axis) if a is not None and a in names)
    token_axes = (token_axes,) if isinstance(token_axes, str) else tuple(token_axes)
    unknown = [a for a in token_axes if a not in names]
    if unknown:
        raise ValueError(
            f"token_axes {token_axes} names {unknown}, which the mesh does not have; its axes are {names}."
        )
    if axis is not None and mesh.shape[axis] > 1 and axis not in token_axes:
        raise ValueError(
            f"token_axes {token_axes} must contain the EP axis {axis!r}: each rank of the group brings its own tokens."
        )
    return token_axes


def check_experts_divide(mesh: Any, axis: str | None, num_experts: int) -> None:
    """Raises ``ValueError`` unless the EP axis divides the experts."""
    ranks = 1 if axis is None else mesh.shape[axis]
    if num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts cannot be spread evenly over the {ranks} devices of mesh axis {axis!r}: E must be "
            f"a multiple of P. Use an EP size that divides {num_experts}, or add experts."
        )
