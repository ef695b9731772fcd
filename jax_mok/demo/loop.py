"""The training loop: AdamW on float32 parameters, checkpoints, a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jax_mok as mok
from jax_mok.demo import corpus
from jax_mok.demo.settings import Settings
from jax_mok.demo.task import Task


class State(NamedTuple):
    params: Any
    optimizer: Any


class Trainer:
    """One task on one mesh: the compiled step, and runs of it from a state to a later one."""

    def __init__(self, task: Task, mesh: Mesh, settings: Settings) -> None:
        self.task, self.mesh, self.settings = task, mesh, settings
        self.text = corpus.load(settings.corpus_bytes)
        rate = optax.warmup_constant_schedule(0.0, settings.learning_rate, settings.warmup)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))

        def init() -> State:
            # Steps donate their state, so every run starts on a copy; and moments go where their parameters are.
            params = jax.tree.map(lambda a: a.copy(), task.params)
            return jax.tree.map(self._on_mesh, State(params, optimizer.init(params)))

        def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
            (_, nats), grads = jax.value_and_grad(task.loss, has_aux=True)(state.params, tokens)
            updates, moments = optimizer.update(grads, state.optimizer, state.params)
            return State(optax.apply_updates(state.params, updates), moments), nats

        self.init = init
        self.routed = jax.jit(task.routed)
        shardings = jax.tree.map(lambda a: a.sharding, init())
        self._step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

    def _on_mesh(self, a: jax.Array) -> jax.Array:
        placed = isinstance(a.sharding, NamedSharding) and a.sharding.mesh == self.mesh
        return a if placed else jax.device_put(a, NamedSharding(self.mesh, P()))

    def tokens(self, step: int) -> jax.Array:
        """The global batch of a step, spread over the mesh."""
        s = self.settings
        batch = corpus.batch(self.text, s.seed, step, s.batch, s.model.sequence)
        return jax.device_put(batch, NamedSharding(self.mesh, P("expert")))

    def run(
        self,
        state: State,
        first: int,
        last: int,
        console: Console,
        label: str,
        after_step: Callable[[int, State, float], None] = lambda *_: None,
    ) -> State:
        """Steps ``first .. last - 1``. ``after_step(done, state, loss)`` follows each of them."""
        settings = self.settings
        columns = (
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress, mok.typed_errors():
            bar = progress.add_task(label, total=last, completed=first, loss=float("nan"), rate=0.0)
            start = None
            for step in range(first, last):
                state, loss_array = self._step(state, self.tokens(step))
                loss = float(loss_array)
                if not np.isfinite(loss):
                    raise FloatingPointError(
                        f"The loss is {loss} after step {step + 1}; lower the learning rate (now "
                        f"{settings.learning_rate})."
                    )
                now = time.perf_counter()
                start = now if start is None else start  # the first step compiles; it is not part of the rate
                rate = (step - first) * settings.tokens_per_step / max(now - start, 1e-9)
                progress.update(bar, completed=step + 1, loss=loss, rate=rate)
                after_step(step + 1, state, loss)
        return state
