"""The loss curve as a PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import numpy as np


def loss_curve(losses: list[float], path: Path, title: str) -> None:
    # A bare Figure draws through Agg and leaves the caller's pyplot state and backend alone.
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="loss")
    window = max(1, len(losses) // 20)
    if window > 1:
        mean = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], mean, color="tab:blue", linewidth=2, label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="nats per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
