"""The whole job: train, save, plot, and prove (or disprove) that it is reproducible."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jax_mok.demo import determinism, devices, plot
from jax_mok.demo.checkpoints import Checkpoints
from jax_mok.demo.loop import State, Trainer
from jax_mok.demo.settings import Plan, SettingsError

_EP_SIZES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run found.

    - ``losses``: per step, nats per byte.
    - ``params_digest``, ``replay_digest``: of the final parameters, first and second run; ``replay_from`` is the step
      where the second one started.
    - ``gradient_digests``: per EP size, a digest per array of one routed call.
    - ``native``: whether the native kernels ran that call; the ``"xla"`` fallback promises the same bits from run to
      run only where XLA does, and not for different EP sizes.
    - ``seconds``: of the whole job.
    """

    losses: list[float]
    params_digest: str
    replay_digest: str
    replay_from: int
    gradient_digests: dict[int, dict[str, str]]
    native: bool
    seconds: float

    @property
    def repeats(self) -> bool:
        return self.params_digest == self.replay_digest

    @property
    def ep_invariant(self) -> bool:
        sizes = list(self.gradient_digests.values())
        return all(one == sizes[0] for one in sizes)

    @property
    def failures(self) -> list[str]:
        """Promises that were not kept; empty if all is well."""
        found = []
        if not self.repeats:
            found.append("two runs from the same state ended in different parameters")
        if self.native and not self.ep_invariant:
            found.append("the routed gradients differ between EP sizes")
        return found


def run(trainer: Trainer, plan: Plan, console: Console | None = None) -> Report:
    """Trains, then trains again, and compares; writes checkpoints, ``loss.png`` and ``report.json``."""
    console = console or Console()
    began = time.perf_counter()
    settings, mesh = trainer.settings, trainer.mesh
    count = sum(a.size for a in jax.tree.leaves(trainer.task.params))
    console.print(
        f"{settings.framework}: {count / 1e6:.2f} M parameters, {len(trainer.text) / 1e6:.1f} MB of text, "
        f"{settings.tokens_per_step} tokens a step on {mesh.size} {mesh.devices.flat[0].device_kind} devices"
    )
    with Checkpoints(settings, plan) as checkpoints:
        state, losses = _train(trainer, checkpoints, plan, console)
        replayed, replay_from = _replay(trainer, checkpoints, plan, console)
    plot.loss_curve(losses, plan.output / "loss.png", f"Byte-level MoE transformer ({settings.framework})")

    call = jax.device_get(trainer.routed(state.params, trainer.tokens(plan.steps)))
    by_size = {}
    for size in _EP_SIZES:
        if size <= settings.devices and settings.model.experts % size == 0:
            by_size[size] = determinism.routed_gradients(call, devices.expert_mesh(size), settings.model.moe)
    report = Report(
        losses=losses,
        params_digest=determinism.digest(state.params),
        replay_digest=determinism.digest(replayed.params),
        replay_from=replay_from,
        gradient_digests={size: found.digests for size, found in by_size.items()},
        native=all(found.native for found in by_size.values()),
        seconds=time.perf_counter() - began,
    )
    (plan.output / "report.json").write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    _show(report, plan, console)
    return report


def _train(trainer: Trainer, checkpoints: Checkpoints, plan: Plan, console: Console) -> tuple[State, list[float]]:
    state, losses, first = trainer.init(), [], 0
    if plan.resume:
        saved = checkpoints.steps()
        if not saved:
            raise SettingsError(f"The run in {plan.output} has no checkpoint yet. Start it without resume.")
        first = saved[-1]
        if first > plan.steps:
            raise SettingsError(
                f"The run in {plan.output} has {first} steps already and {plan.steps} were asked for; ask for "
                "more steps."
            )
        state, losses = checkpoints.restore(first, state)
        console.print(f"resumed after step {first}")

    def after_step(done: int, state: State, loss: float) -> None:
        losses.append(loss)
        if done in plan.checkpoint_steps and done not in checkpoints.steps():
            checkpoints.save(done, state, losses)

    return trainer.run(state, first, plan.steps, console, "training", after_step), losses


def _replay(trainer: Trainer, checkpoints: Checkpoints, plan: Plan, console: Console) -> tuple[State, int]:
    """The second run, from the beginning or from the last checkpoint before the end."""
    earlier = [step for step in checkpoints.steps() if step < plan.steps]
    state, first = trainer.init(), 0
    if plan.replay == "checkpoint" and earlier:
        first = earlier[-1]
        state, _ = checkpoints.restore(first, state)
    return trainer.run(state, first, plan.steps, console, "replaying"), first


def _show(report: Report, plan: Plan, console: Console) -> None:
    smooth = max(1, len(report.losses) // 20)
    first, last = report.losses[0], float(np.mean(report.losses[-smooth:]))
    start = "the beginning" if report.replay_from == 0 else f"the checkpoint after step {report.replay_from}"
    console.print(f"loss {first:.3f} -> {last:.3f} nats per byte ({1 - last / first:.0%} less)")

    table = Table("computation", "sha256", "verdict", title="Determinism")
    table.add_row("final parameters", report.params_digest[:16])
    table.add_row(f"final parameters, replayed from {start}", report.replay_digest[:16], _verdict(report.repeats))
    names: dict[str, Any] = next(iter(report.gradient_digests.values()))
    sizes = ", ".join(map(str, report.gradient_digests))
    for name in names:
        found = {digests[name] for digests in report.gradient_digests.values()}
        shown = sorted(digest[:16] for digest in found)
        table.add_row(f"routed {name} at P = {sizes}", "\n".join(shown), _verdict(len(found) == 1, report.native))
    console.print(table)
    if not report.native:
        console.print("The native backend did not run here; backend 'xla' does not promise the same bits for every P.")
    for failure in report.failures:
        console.print(f"[bold red]FAILED[/]: {failure}.")
    console.print(f"{plan.output}: loss.png, report.json, checkpoints/  ({report.seconds:.0f} s)")


def _verdict(same: bool, promised: bool = True) -> str:
    if same:
        return "[green]same bits[/]"
    return "[bold red]DIFFERENT[/]" if promised else "[yellow]different[/]"
