"""What the pages say is true: README's example runs, and every test that docs/fault-reports.md names exists."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "jax_mok_backward: T 64 H 256 I 512 E 64 K 8 bfloat16, EP 8" in run.stdout
    assert len(code.splitlines()) <= 26


def test_named_tests_exist():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "fault-reports.md").read_text())
    assert len(named) > 25
    missing = [f"{f}::{t}" for f, t in named if f"def {t}(" not in (ROOT / "tests" / f).read_text()]
    assert not missing


def test_pages_that_readme_links_to_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert all((ROOT / link).exists() for link in links)
