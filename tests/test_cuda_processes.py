"""EP groups of GPUs that span processes: the bits of one GPU, and errors that end. On one GPU they share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_process_cases
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from process_cases import place, program

from jax_mok import runtime

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "cuda_process_cases.py"
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def run_case(tmp_path: Path, processes: int, *scenario: Any, code: int = 0, **variables: str) -> list[Any]:
    """What each process found, ``None`` for one that did not live to say it. ``variables``: of the environment."""
    command = [sys.executable, "-m", "jax_mok", "launch", "-n", processes, "--devices-per-process", 1, CASES]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*map(str, [*command, scenario[0], tmp_path, *scenario[1:]])],
        env={**os.environ, **environment, "JAX_PLATFORMS": "cuda,cpu", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout[-6000:] + done.stderr[-1000:]
    files = [tmp_path / f"{i}.json" for i in range(processes)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files]


def assert_bits_of_one_gpu(tmp_path: Path, processes: int) -> None:
    """Of what the processes of scenario "layer" have written."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("expert",))
    for name, (inputs, config) in cuda_process_cases.layer_runs().items():
        want = cuda_process_cases.local_part(program(mesh, config)(place(inputs, mesh)))
        parts = [list(np.load(tmp_path / f"{name} {i}.npz").values()) for i in range(processes)]
        assert len(want) == 6
        for whole, *pieces in zip(want, *parts, strict=True):
            np.testing.assert_array_equal(np.concatenate(pieces), whole, err_msg=name)


@pytest.mark.parametrize("processes", [2, 4])
def test_the_bits_of_one_gpu(tmp_path, processes):
    found = run_case(tmp_path, processes, "layer")
    assert len({one["bytes"] for one in found}) == 1
    assert_bits_of_one_gpu(tmp_path, processes)


def test_executables_from_the_persistent_cache(tmp_path):
    """Process 1 has no cache and compiles, yet call sites must have the same numbers in both."""
    cache = tmp_path / "cache"
    for start in ("cold", "warm"):
        (tmp_path / start).mkdir()
        found = run_case(
            tmp_path / start,
            2,
            "half_cached",
            XLA_FLAGS="--xla_gpu_shard_autotuning=false",  # else one waits for what the other need not tune
            JAX_COMPILATION_CACHE_DIR=str(cache),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )
        assert [one["cache_hits"] > 0 for one in found] == [start == "warm", False]
        assert_bits_of_one_gpu(tmp_path / start, 2)


def without_seconds(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in step.items() if k != "seconds"} for step in steps]


@pytest.mark.parametrize("processes", [2, 3])
def test_bad_ids_are_raised_by_all_in_the_same_step(tmp_path, processes):
    found = [without_seconds(steps) for steps in run_case(tmp_path, processes, "bad_ids")]
    kinds = [["error" if "error" in s else "nan" if "nan" in s else "sum" for s in steps] for steps in found]
    assert all(k == kinds[0] for k in kinds), kinds
    for steps in found:
        errors = [s for s in steps if "error" in s]
        assert len(errors) == 2, steps
        for error in errors:
            assert error["error"] == "RoutingError"
            assert "expert id 12" in error["message"]
        sums = [s["sum"] for s in steps if "sum" in s]
        assert len(sums) >= len(steps) - 4
        assert len(set(sums)) == 1
        assert "sum" in steps[0]
        assert "sum" in steps[-1]


def test_a_process_need_not_call_to_agree_on_when_all_raise(tmp_path):
    for good, bad, raised, after in run_case(tmp_path, 2, "away"):
        assert "sum" in good
        assert "nan" in bad
        assert raised["error"] == "RoutingError"
        assert raised["seconds"] < 1
        assert after["sum"] == good["sum"]


def test_processes_that_are_out_of_step_are_told(tmp_path):
    for good, _, *later in run_case(tmp_path, 2, "out_of_step"):
        assert "sum" in good
        assert not any("sum" in step for step in later)
        assert {step["error"] for step in later if "error" in step} == {"ShapeMismatchError"}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_ends_the_group(tmp_path, victim):
    found = run_case(tmp_path, 3, "killed", victim, code=128 + 9)
    assert found.pop(victim) is None
    for good, *later in found:
        assert "sum" in good
        errors = [step for step in later if "error" in step]
        assert len(errors) >= 2, later
        for error in errors:
            assert error["error"] == "PeerTimeoutError"
            assert f"EP rank {victim} of 3" in error["message"]
        for step in later:
            assert "sum" not in step
            assert step["seconds"] < cuda_process_cases.CONFIG.timeout_s + 2


def test_late_processes(tmp_path):
    for slow_start, second, *later in run_case(tmp_path, 2, "late"):
        assert slow_start["sum"] == second["sum"]
        for step in later:
            assert "sum" not in step
            assert step["seconds"] < cuda_process_cases.CONFIG.timeout_s + 2
        errors = {step["error"] for step in later if "error" in step}
        assert errors == {"PeerTimeoutError"}


def test_memory_is_shared_by_file_descriptors_or_fabric_handles():
    refused = [runtime.native().cuda_sharing_refusal(0, way) for way in ("file descriptors", "fabric handles")]
    assert "" in refused, refused
