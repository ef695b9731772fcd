"""Training on other numbers of processes than were there before: the same parameters. A file of its own, so that it can
run beside the other tests of processes, which are as long."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from process_cases import launch

SCRIPT = Path(__file__).parent.parent / "examples" / "train_multihost.py"
pytestmark = pytest.mark.timeout(300)


def train(tmp_path: Path, processes: int, devices: int, *args: Any) -> tuple[str, str]:
    """Its steps, and the digest of the final parameters."""
    fast = "--xla_backend_optimization_level=0"  # most of the time is compilation, in every process
    done = launch(processes, devices, SCRIPT, "--output", tmp_path, *args, XLA_FLAGS=fast)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    (steps,) = re.findall(rf"{processes} processes, 4 devices: (steps \d+ to \d+)", done.stdout)
    (digest,) = re.findall(r"parameters ([0-9a-f]{64})", done.stdout)
    return steps, digest


def test_training_saved_by_four_processes_and_resumed_by_two(tmp_path):
    """Four, then two processes end with the parameters of an uninterrupted run in one, so they had them halfway too."""
    _, halfway = train(tmp_path / "many", 4, 1, "--steps", 4)
    steps, end = train(tmp_path / "many", 2, 2, "--steps", 8, "--resume")
    assert steps == "steps 4 to 8"
    assert ("steps 0 to 8", end) == train(tmp_path / "one", 1, 4, "--steps", 8)
    assert end != halfway
