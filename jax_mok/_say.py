"""Warnings that a user should see once, not once a layer."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def say_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
