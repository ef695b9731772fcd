"""Checkpoints through orbax: parameters, optimizer state and the losses so far."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jax_mok.demo.settings import Plan, Settings, SettingsError

_MARKER = "run.json"


class Checkpoints:
    """The checkpoints of one run, under ``plan.output``; a context manager.

    A new run replaces the checkpoints of an earlier one in the same directory, a resumed one adds to them.

    **Raises** ``SettingsError`` for a new run in a directory that holds something else, and for a resume without a run
    to continue or with other settings.
    """

    def __init__(self, settings: Settings, plan: Plan) -> None:
        output = plan.output.absolute()
        directory, marker = output / "checkpoints", output / _MARKER
        identity = json.loads(json.dumps(dataclasses.asdict(settings)))
        if plan.resume:
            _check_same_run(marker, identity)
        elif directory.exists() and not marker.exists():
            raise SettingsError(
                f"{directory} exists and was not written by this demo (no {_MARKER} beside it). "
                "Choose another output directory."
            )
        _together("checked")  # before one process changes what another still looks at
        if jax.process_index() == 0:
            if not plan.resume:
                shutil.rmtree(directory, ignore_errors=True)
            output.mkdir(parents=True, exist_ok=True)
            marker.write_text(json.dumps(identity, indent=2) + "\n")
        _together("marked")
        self._manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(create=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, losses: list[float]) -> None:
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(state)), losses=ocp.args.JsonSave({"nats": losses})
        )
        self._manager.save(step, args=items)
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> tuple[Any, list[float]]:
        """The state saved after ``step``, with the structure and the shardings of ``like``, and the losses so far."""
        named = _named(like)
        target = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in named.items()}
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), losses=ocp.args.JsonRestore())
        saved: Any = self._manager.restore(step, args=items)
        leaves = [saved.state[name] for name in named]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), list(saved.losses["nats"])


def _together(where: str) -> None:
    """Waits for the other processes of the job, if there are any."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"jax_mok checkpoints {where}")


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by path: what is on disk does not depend on a framework's container classes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _check_same_run(marker: Path, identity: dict[str, Any]) -> None:
    if not marker.exists():
        raise SettingsError(f"There is no run to resume: {marker} does not exist. Start one without resume.")
    before = json.loads(marker.read_text())
    changed = [
        f"{name}: {before.get(name)!r} then, {now!r} now" for name, now in identity.items() if before.get(name) != now
    ]
    if changed:
        raise SettingsError(
            f"The run in {marker.parent} had other settings ({'; '.join(changed)}). Resume it with the same ones, or "
            "start a new run without resume."
        )
