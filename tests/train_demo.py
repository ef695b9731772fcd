"""Trains the demo's model: ``train_demo.py BACKEND STEPS DEVICES OUTPUT``. OUTPUT, a JSON file, gets the loss of each
step and a digest of the parameters."""

import json
import sys
from pathlib import Path

from rich.console import Console

import jax_mok as mok
from jax_mok.demo import determinism, devices
from jax_mok.demo.loop import Trainer
from jax_mok.demo.model_flax import build
from jax_mok.demo.settings import ModelConfig, Settings


def train(backend: str, steps: int, count: int) -> dict:
    devices.reproducible()
    devices.request(count)
    mesh = devices.expert_mesh(count)
    settings = Settings(model=ModelConfig(moe=mok.MoEConfig(backend=backend)), devices=count)
    trainer = Trainer(build(settings.model, mesh, settings.seed), mesh, settings)
    losses = []
    quiet = Console(quiet=True)
    state = trainer.run(trainer.init(), 0, steps, quiet, backend, lambda _, __, loss: losses.append(loss))
    return {"losses": losses, "digest": determinism.digest(state.params)}


if __name__ == "__main__":
    backend, steps, count, output = sys.argv[1:]
    Path(output).write_text(json.dumps(train(backend, int(steps), int(count))))
