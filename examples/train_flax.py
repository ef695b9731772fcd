"""Train a byte-level mixture-of-experts transformer with Flax NNX, and see that it trains to the same bits twice.

    pip install 'jax_mok[demo]'
    python examples/train_flax.py --steps 200
    python examples/train_flax.py --steps 400 --resume

The model, with one ``jax_mok.flax.MoE`` per layer, is a page to copy from: ``jax_mok/demo/model_flax.py``. The
training step, in ``jax_mok/demo/loop.py``, is plain JAX and optax. Runs on the GPUs there are, else on virtual CPU
devices.
"""

import argparse
import sys
from pathlib import Path

from jax_mok import MoEConfig
from jax_mok.demo import devices
from jax_mok.demo.loop import Trainer
from jax_mok.demo.model_flax import build
from jax_mok.demo.run import run
from jax_mok.demo.settings import ModelConfig, Plan, Settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--devices", type=int, help="EP ranks; default: up to eight of the GPUs, or virtual CPU devices"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/train_flax"))
    parser.add_argument("--resume", action="store_true", help="continue the run in the output directory")
    args = parser.parse_args()

    # Sixteen experts in each of two layers, two of them per token; "recompute" would trade time for memory.
    model = ModelConfig(layers=2, hidden=128, inter=256, experts=16, top_k=2, moe=MoEConfig(residuals="save"))
    settings = Settings("flax", model, batch=16, devices=args.devices, learning_rate=3e-3)

    devices.reproducible()
    devices.request(args.devices)
    mesh = devices.expert_mesh(args.devices)  # one axis, "expert": the batch and the experts are spread over it
    task = build(model, mesh, settings.seed)  # float32 parameters, on the mesh, and the loss as a function of them
    trainer = Trainer(task, mesh, settings)  # AdamW and the compiled step
    report = run(trainer, Plan(args.steps, args.output, args.resume))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
