"""EP groups that span processes: the same bits as in one process, and errors that end when a process does."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import process_cases
import pytest
from jax.sharding import Mesh
from process_cases import launch

import jax_mok as mok

CASES = Path(process_cases.__file__)
pytestmark = pytest.mark.timeout(300)


def run_case(
    tmp_path: Path, processes: int, devices: int, *scenario: Any, code: int = 0, **environment: str
) -> list[Any]:
    """What each process found, ``None`` for one that did not live to say it."""
    done = launch(processes, devices, CASES, scenario[0], tmp_path, *scenario[1:], **environment)
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-1000:]
    files = [tmp_path / f"{i}.json" for i in range(processes)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files]


@functools.cache
def in_this_process(devices: int, wanted: tuple[str, ...] = ()) -> dict[str, str]:
    return process_cases.layer_digests(jax.devices()[:devices], wanted)


@pytest.mark.parametrize(("processes", "devices", "cases"), [(2, 4, "full"), (4, 1, "full"), (8, 1, "short")])
def test_any_layout_of_processes_gives_the_same_bits(tmp_path, processes, devices, cases):
    wanted = process_cases.SHORT if cases == "short" else ()
    alone, together = in_this_process(1, wanted), in_this_process(processes * devices, wanted)
    assert together == alone
    assert len(alone) == (2 if cases == "short" else 11)
    for found in run_case(tmp_path, processes, devices, "layer", cases):
        assert found["spanning"] == together
        assert found["inside"] == ({"bfloat16": alone["bfloat16"]} if devices > 1 else {})


def test_executables_from_the_persistent_cache(tmp_path):
    """JAX gives them other names than compiled ones, and only process 0 finds its programs there."""
    for start in ("cold", "warm"):
        (tmp_path / start).mkdir()
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for found in run_case(tmp_path / start, 2, 1, "layer", "short", **environment):
            assert found["spanning"] == in_this_process(1, process_cases.SHORT)
        assert list((tmp_path / "cache").glob("jit_run*"))


def test_devices_beside_a_group_are_not_left_waiting_in_any_process(tmp_path):
    assert run_case(tmp_path, 2, 4, "beside") == [["finite", "nan", "RoutingError", "finite"]] * 2


def test_a_mesh_that_may_be_in_one_process_has_to_be_named(tmp_path):
    inputs = process_cases.make_inputs(64, 48, 32, 8, 2, dtype="bfloat16")
    args = process_cases.place(inputs, Mesh(np.array(jax.devices()[:1]), ("expert",)))
    want = process_cases.digest(mok.moe(*args[:4]))
    for found in run_case(tmp_path, 2, 4, "ambiguous"):
        assert "jax.set_mesh" in found["refusal"]
        assert found["y"] == want


@pytest.mark.parametrize(("victim", "stage"), [(0, "forward"), (1, "backward"), (2, "forward")])
def test_a_killed_process_is_an_error_that_names_its_rank(tmp_path, victim, stage):
    """tests/cpp/process_test.h kills every rank at every stage of a call."""
    shared_memory = sorted(os.listdir("/dev/shm"))
    found = run_case(tmp_path, 3, 1, "killed", victim, stage, code=128 + 9)
    assert found.pop(victim) is None
    for good, failed, later, restarted in found:
        assert "digest" in good
        for step in (failed, later):
            assert step["error"] == "PeerDiedError"
            assert f"EP rank {victim} of 3" in step["message"]
            assert step["seconds"] < process_cases.CONFIG.timeout_s + 2
        assert "digest" in restarted
    assert sorted(os.listdir("/dev/shm")) == shared_memory


def test_late_processes_and_another_job(tmp_path):
    zero, one = run_case(tmp_path, 2, 2, "late")
    for slow_start, second, timed_out, after, *_, restarted in (zero, one):
        assert slow_start["digest"] == second["digest"] == after["digest"] == restarted["digest"]
        assert timed_out["error"] == "PeerTimeoutError"
    assert zero[0]["seconds"] > 3  # longer than timeout_s, and no error
    skipped = zero[4]
    for error in (zero[2], one[2], skipped):
        assert error["error"] == "PeerTimeoutError"
        assert re.search(r"EP rank [23] of 4 .* within 2\.5", error["message"])
        assert error["seconds"] < process_cases.CONFIG.timeout_s + 2


def test_the_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, jax, helper\n"
        "print(sys.argv[1:], jax.process_index(), jax.process_count(), jax.local_device_count(), helper.here)\n"
        "if jax.process_index() == 1: sys.exit(5)\n"
        "time.sleep(3600)\n"
    )
    (tmp_path / "helper.py").write_text("here = 'beside the script'\n")
    done = launch(2, 3, script, "--steps", 7, "-n", 9)
    assert done.returncode == 5, done.stdout + done.stderr
    for i in range(2):
        assert f"[{i}] ['--steps', '7', '-n', '9'] {i} 2 3 beside the script" in done.stdout
    assert "process 1 ended with exit code 5" in done.stderr
