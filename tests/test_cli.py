"""The command line, and that the library does not pull it in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jax_mok import cli
from jax_mok.cli import extras
from jax_mok.cli.app import app

CLI_ONLY = {"typer", "rich", "matplotlib", "platformdirs"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "jax_mok", *args], capture_output=True, text=True, check=False)


def test_importing_the_library_does_not_import_the_packages_of_the_command_line():
    code = "import sys, jax_mok; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "jax_mok" in out.split()
    assert not CLI_ONLY & set(out.split())


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extras, "version", lambda package: None if package == "typer" else "1.0")
    with pytest.raises(SystemExit) as exit:
        cli.main()
    message = str(exit.value)
    assert "typer" in message
    assert "pip install 'jax_mok[cli]'" in message
    assert "\n" not in message


def test_extras_are_those_of_the_project_file():
    path = Path(__file__).parents[1] / "pyproject.toml"
    declared = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    for extra, packages in extras.EXTRAS.items():
        text = " ".join(declared[extra])
        assert all(package in text for package in packages)
        assert all(other in text for other in extras._INCLUDES.get(extra, ()))


def test_doctor_explains_every_backend_and_exits_by_what_it_found():
    done = run("doctor")
    for name in ("cpu", "cuda", "xla", "reference", "native module", "cache directory"):
        assert name in done.stdout
    assert ("runs natively here" in done.stdout) == (done.returncode == 0), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("demo", "--devices", "3"), "multiple of 3"),
        (("demo", "--framework", "torch"), "equinox"),
        (("inspect", "--ranks", "3"), "spread evenly over 3 ranks"),
        (("bench", "--experts", "4", "--devices", "2"), "top-8 needs at least 8 experts"),
        (("bench", "--train", "--pass", "fwd"), "leave out --pass fwd"),
        (("bench", "--train", "--hot-expert", "7"), "leave out --hot-expert"),
    ],
)
def test_impossible_requests_are_usage_errors(args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which commands add to
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output


def test_bench_compares_and_writes_what_it_found(tmp_path: Path):
    sizes = {"tokens": 16, "hidden": 8, "inter": 8, "experts": 4, "top-k": 2, "devices": 2, "rounds": 2}
    small = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = run("bench", *small, "--backend", "xla", "--backend", "reference", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    assert {(t["contender"], t["of"]) for t in found["timings"]} == {
        (name, of) for name in ("xla", "reference") for of in ("fwd", "fwd+bwd")
    }
    assert all(t["median_ms"] > 0 for t in found["timings"])
    assert set(found["differences"]["reference"]) == {"y", "dx", "d_router_weights", "d_gate", "d_up", "d_down"}
    assert (tmp_path / "bench.png").stat().st_size > 0
