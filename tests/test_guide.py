"""The guides' code runs as printed: what a reader copies works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["replace-your-moe-block.md"])
def test_python_blocks_of_the_page_run_in_order(page):
    text = (DOCS / page).read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace = {"__name__": "guide"}
    for block in blocks:
        # blank lines in front, so that a traceback names the line of the page
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(code, str(DOCS / page), "exec"), namespace)
