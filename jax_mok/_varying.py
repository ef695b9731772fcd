"""Which mesh axes a value varies over inside ``shard_map`` (JAX's "manual axis type").

Inside a ``shard_map`` with ``check_vma=True`` every value carries the set of axes it varies over, and JAX's gradients
rely on it; with ``check_vma=False`` the sets are empty and all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

Axes = frozenset[Hashable]


def axes_of(x: Any) -> Axes:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def union_of(tree: Any) -> Axes:
    return frozenset().union(*(axes_of(x) for x in jax.tree.leaves(tree)))


def vary_over(tree: Any, axes: Iterable[Hashable]) -> Any:
    """Casts every leaf to vary over ``axes`` too. The transpose is a psum: the gradient of a value that was the
    same everywhere is the sum over where it was used."""

    def cast(x: Any) -> Any:
        missing = tuple(sorted(frozenset(axes) - axes_of(x), key=str))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def struct(shape: tuple[int, ...], dtype: Any, like: Any, without: Iterable[Hashable] = ()) -> jax.ShapeDtypeStruct:
    """Result type of a foreign call whose value varies over the axes of ``like`` except ``without``."""
    kind = jax.typeof(like).manual_axis_type
    kind = kind.update(varying=frozenset(kind.varying) - frozenset(without))
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=kind)
