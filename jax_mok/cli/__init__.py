"""The command line, ``jax-mok`` or ``python -m jax_mok``. Nothing of it is imported by ``import jax_mok``."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; without its packages, says in one line how to get them."""
    from jax_mok.cli.extras import missing

    if packages := missing("cli"):
        sys.exit(
            f"jax-mok: the command line needs {', '.join(packages)}, not installed here. "
            "Run: pip install 'jax_mok[cli]'"
        )
    from jax_mok.cli.app import app

    app()
