"""Train the demo's transformer on one process or on many, and print a digest of the final parameters.

    pip install 'jax_mok[demo]'
    python examples/train_multihost.py                                                   # one process
    python -m jax_mok launch -n 4 examples/train_multihost.py                            # four, on this machine
    python -m jax_mok launch -n 2 --devices-per-process 2 examples/train_multihost.py    # the same end
    srun --ntasks-per-node=4 python examples/train_multihost.py --distributed            # a SLURM job

All devices of the job make one EP group, whatever process they are in. Every process runs this same script; each knows
its own devices and the mesh of all. See docs/many-processes.md.
"""

import argparse
import sys
from pathlib import Path

import jax
from rich.console import Console

from jax_mok import MoEConfig
from jax_mok.demo import devices
from jax_mok.demo.checkpoints import Checkpoints
from jax_mok.demo.determinism import digest
from jax_mok.demo.loop import Trainer
from jax_mok.demo.model_flax import build
from jax_mok.demo.settings import ModelConfig, Plan, Settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/train_multihost"), help="seen by all processes")
    parser.add_argument("--resume", action="store_true", help="continue the run in the output directory")
    parser.add_argument("--backend", default="auto", help="of the MoE layer, as MoEConfig.backend")
    parser.add_argument(
        "--distributed", action="store_true", help="join the job that SLURM, MPI or Kubernetes describes"
    )
    args = parser.parse_args()

    if args.distributed:
        jax.distributed.initialize()
    count = jax.device_count()
    mesh = devices.expert_mesh(count)
    size = max(16, count)  # experts and sequences: at least one of each on every device
    moe = MoEConfig(backend=args.backend, residuals="save")
    model = ModelConfig(layers=2, hidden=64, inter=128, experts=size, sequence=64, moe=moe)
    settings = Settings("flax", model, batch=size, devices=count, learning_rate=3e-3)
    plan = Plan(args.steps, args.output, args.resume)

    trainer = Trainer(build(model, mesh, settings.seed), mesh, settings)  # the same seed, so the same parameters
    state, losses, first = trainer.init(), [], 0
    console = Console(quiet=jax.process_index() > 0)
    with Checkpoints(settings, plan) as checkpoints:  # each process writes and reads the shards of its devices
        if args.resume:
            first = checkpoints.steps()[-1]
            state, losses = checkpoints.restore(first, state)
        state = trainer.run(state, first, args.steps, console, "training", lambda _, __, loss: losses.append(loss))
        checkpoints.save(args.steps, state, losses)

    found = digest(state.params)  # of all shards: every process has its part in it
    console.print(
        f"{jax.process_count()} processes, {count} devices: steps {first} to {args.steps}, loss {losses[-1]:.4f}"
    )
    console.print(f"parameters {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
