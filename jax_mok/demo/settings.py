"""What the demo trains and how. Frozen: a run is a pure function of these values."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal, get_args

import jax_mok as mok

Framework = Literal["flax", "equinox"]
Replay = Literal["checkpoint", "scratch"]

VOCABULARY = 256  # bytes


class SettingsError(ValueError):
    """What was asked for is impossible here; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the byte-level transformer: per layer one causal attention and one MoE block."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    inter: int = 256
    experts: int = 16
    top_k: int = 2
    sequence: int = 128
    moe: mok.MoEConfig = dataclasses.field(default_factory=mok.MoEConfig)

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise SettingsError(f"hidden = {self.hidden} must be a multiple of heads = {self.heads}.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained: with the number of steps, these values decide every bit of the result. A resumed run must have
    those of the run that it continues.

    **Arguments**

    - ``framework``: ``"flax"`` (NNX) or ``"equinox"``.
    - ``model``: :class:`ModelConfig`.
    - ``batch``: sequences per step; a multiple of ``devices``.
    - ``devices``: EP ranks; virtual ones where the machine has only CPUs.
    - ``learning_rate``, ``warmup``: AdamW's peak rate, reached after ``warmup`` steps and held. No decay: the rate at
      a step must not depend on the length of the run, or a run could not be prolonged.
    - ``seed``: of the initial parameters and of the order of the data.
    - ``corpus_bytes``: how much text to read.
    """

    framework: Framework = "flax"
    model: ModelConfig = ModelConfig()
    batch: int = 16
    devices: int = 8
    learning_rate: float = 3e-3
    warmup: int = 20
    seed: int = 0
    corpus_bytes: int = 4_000_000

    def __post_init__(self) -> None:
        _one_of("framework", self.framework, get_args(Framework))
        for name in ("batch", "devices", "warmup", "corpus_bytes"):
            _at_least(1, name, getattr(self, name))
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise SettingsError(f"learning_rate is {self.learning_rate}; it must be a finite number greater than 0.")
        if self.batch % self.devices:
            raise SettingsError(
                f"batch = {self.batch} sequences cannot be spread evenly over {self.devices} devices; "
                f"use a multiple of {self.devices}."
            )
        if self.model.experts % self.devices:
            raise SettingsError(
                f"{self.model.experts} experts cannot be spread evenly over {self.devices} devices; use a number of "
                f"devices that divides {self.model.experts}."
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.sequence


@dataclasses.dataclass(frozen=True)
class Plan:
    """How far one invocation goes, and where its files are.

    **Arguments**

    - ``steps``: optimizer steps in total, those before a resume included.
    - ``output``: directory for checkpoints, loss curve and report.
    - ``resume``: continue the run in ``output`` from its last checkpoint.
    - ``checkpoint_every``: steps between checkpoints; 0 = one halfway and one at the end.
    - ``replay``: where the second run of the determinism report starts.
    """

    steps: int = 240
    output: Path = Path("runs/demo")
    resume: bool = False
    checkpoint_every: int = 0
    replay: Replay = "checkpoint"

    def __post_init__(self) -> None:
        _one_of("replay", self.replay, get_args(Replay))
        _at_least(2, "steps", self.steps)
        _at_least(0, "checkpoint_every", self.checkpoint_every)

    @property
    def checkpoint_steps(self) -> frozenset[int]:
        """Steps after which the state is saved; always one before the last, so that a replay has where to start."""
        every = self.checkpoint_every or self.steps // 2
        return frozenset({*range(every, self.steps, every), self.steps})


def _one_of(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise SettingsError(f"{name} is {given!r}; it must be one of {', '.join(map(repr, allowed))}.")


def _at_least(least: int, name: str, given: int) -> None:
    if given < least:
        raise SettingsError(f"{name} is {given}; it must be at least {least}.")
