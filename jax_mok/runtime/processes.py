"""EP groups that span processes: which ones do, and how their processes find each other."""

from __future__ import annotations

import atexit
import hashlib
import threading
from collections.abc import Hashable
from typing import Any, Final

import jax
import numpy as np
from jax._src import distributed  # the key-value store of jax.distributed has no public name
from jax._src.mesh import get_concrete_mesh
from jax.sharding import Mesh

from jax_mok.runtime import sharing
from jax_mok.runtime.sharing import Seating

UNKNOWN: Final = "?"
ALL_DEVICES: Final = "all"

_native: Any = None
_devices: dict[str, list[Any]] = {}  # by span: see _linked
_seatings: dict[str, Seating] = {}  # by name
_refused: dict[str, str] = {}  # by name: why there is no seating
_lock = threading.Lock()
_job: Any = None  # the client of jax.distributed that the native side's groups belong to


def attach(native: Any) -> None:
    """Gives the native module the key-value store, in which the founder of a group posts where its memory is."""
    global _native
    _native = native
    native.set_board(_post, _read)
    atexit.register(native.stop_watching)


def span_of(mesh: Any, axis: Hashable | None) -> str:
    """Names the EP groups of this mesh axis among all processes, by the order of the mesh's devices: groups of other
    devices have other names.

    ``""`` if every group is in one process. :data:`UNKNOWN` if the mesh is abstract and its devices may or may not be
    those of one process.
    """
    _notice_new_job()
    if axis is None or mesh is None or jax.process_count() == 1:
        return ""
    concrete = mesh if isinstance(mesh, Mesh) else get_concrete_mesh()
    if dict(concrete.shape) != dict(mesh.shape):  # none, or not the one of the surrounding shard_map
        return ALL_DEVICES if mesh.size > jax.local_device_count() else UNKNOWN
    groups = np.moveaxis(concrete.devices, concrete.axis_names.index(axis), -1).reshape(-1, concrete.shape[axis])
    if all(len({device.process_index for device in group}) == 1 for group in groups):
        return ""
    ids = ",".join(str(device.id) for device in concrete.devices.flat)
    span = hashlib.sha256(ids.encode()).hexdigest()[:16]
    _devices[span] = _linked(groups.tolist())
    return span


def _linked(groups: list[list[Any]]) -> list[Any]:
    """This process's devices and those that they exchange rows with, directly or not, in JAX's order. None at all if
    not every process of these has a part in every group."""
    processes, linked = {jax.process_index()}, set[Any]()
    while True:
        parts = [found for group in groups if (found := {d.process_index for d in group}) & processes]
        linked = {d for group in groups if processes & {d.process_index for d in group} for d in group}
        if processes.issuperset(set().union(*parts)):
            even = all(part == processes for part in parts)
            return sorted(linked, key=lambda d: d.id) if even else []
        processes = processes.union(*parts)


def gpu_refusal(span: str) -> str | None:
    """Why the GPUs of a span cannot exchange rows, or ``None``. Processes that hear of a failure ask all that they are
    linked with, and one without a part in the group would not know of it."""
    if _devices.get(span) != []:
        return None
    return "some of its EP groups are in other processes than the groups that they share processes with"


def gpu_seating(span: str, patience_s: float) -> tuple[str, list[int], str]:
    """The GPUs that the EP groups of a span can be of: a name for them, their CUDA ordinals in this process, and how
    they share memory. Raises as :class:`Seating` does."""
    if not span:
        return "", [d.local_hardware_id for d in jax.local_devices(backend="gpu")], "none"
    devices = _devices.get(span, jax.devices("gpu"))
    me = jax.process_index()
    ordinals = [d.local_hardware_id if d.process_index == me else sharing.ELSEWHERE for d in devices]
    mine = next(n for n in ordinals if n != sharing.ELSEWHERE)
    owners = [(d.process_index, d.id) for d in devices]
    name = sharing.name_of(owners)
    with _lock:
        if name in _refused:  # the others know; asking them again would be out of step
            raise RuntimeError(_refused[name])
        if name not in _seatings:
            refusals = {way: _native.cuda_sharing_refusal(mine, way) for way in (sharing.FABRIC, sharing.FILES)}
            try:
                _seatings[name] = Seating(owners, me, sharing.Board(_post, _read), refusals, patience_s)
            except Exception as error:
                _refused[name] = str(error)
                raise
        return name, ordinals, _seatings[name].way


def gpu_share(name: str, piece: str, size: int, handles: list[Any], patience_s: float) -> list[Any]:
    """See :meth:`Seating.share`."""
    return _seatings[name].share(piece, size, handles, patience_s)


def gpu_agree(name: str, number: int, following: int) -> int:
    """See :meth:`Seating.agree`."""
    return _seatings[name].agree(number, following)


def _notice_new_job() -> None:
    """After ``jax.distributed.shutdown()`` and another ``initialize()``, groups come together anew."""
    global _job
    if _job is not distributed.global_state.client:
        if _job is not None and _native is not None:
            _native.set_board(_post, _read)
            for seating in _seatings.values():
                seating.close()
            _seatings.clear()
            _refused.clear()
        _job = distributed.global_state.client


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("an EP group spans processes and jax.distributed is not initialized")
    return client


def _post(name: str, text: str) -> None:
    _client().key_value_set(f"jax_mok/{name}", text)


def _read(name: str, seconds: float) -> str | None:
    try:
        return _client().blocking_key_value_get(f"jax_mok/{name}", int(seconds * 1000))
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
