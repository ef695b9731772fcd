"""Real text that every machine has: the sources of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np

from jax_mok.demo.settings import SettingsError

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


def load(max_bytes: int, root: Path | None = None) -> np.ndarray:
    """The first ``max_bytes`` of all ``*.py`` files under ``root``, uint8, in the order of their relative paths.

    The same interpreter gives the same bytes on every run and in every process; another Python version has another
    library and so another corpus.

    **Raises** ``SettingsError`` where the library has no sources (some embedded Pythons ship bytecode only).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = []
    for directory, below, names in os.walk(root):
        below[:] = set(below) - _NOT_STDLIB  # not walked: there may be far more in them than in the library
        paths = (Path(directory, name) for name in names if name.endswith(".py"))
        files += [(path.relative_to(root).as_posix(), path) for path in paths]
    chunks, size = [], 0
    for _, path in sorted(files):
        if size >= max_bytes:
            break
        chunks.append(path.read_bytes()[: max_bytes - size])
        size += len(chunks[-1])
    if not size:
        raise SettingsError(
            f"No Python sources under {root}: the demo trains on the standard library's *.py files. "
            "Use a Python that ships them, or pass another directory."
        )
    return np.frombuffer(b"".join(chunks), np.uint8)


def batch(text: np.ndarray, seed: int, step: int, size: int, sequence: int) -> np.ndarray:
    """int32 ``[size, sequence + 1]``: random windows of the text, a pure function of ``(seed, step)``, so that a
    resumed run sees the data it would have seen."""
    if len(text) <= sequence:
        raise SettingsError(
            f"The corpus has {len(text)} bytes and a window needs {sequence + 1}; read more text (corpus_bytes) or "
            "use a shorter sequence."
        )
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - sequence, size)
    return text[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
