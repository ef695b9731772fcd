"""Run-time errors, typed.

XLA raises one exception type, ``jax.errors.JaxRuntimeError``, for everything that fails inside a compiled program.
The layer's own failures carry a tag in the message; :func:`typed_errors` and :func:`as_typed` turn them into the
classes below.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator


class MoEError(RuntimeError):
    """A fused layer failed at run time; every rank of its EP group reports the same error."""


class RoutingError(MoEError):
    """An expert id is neither -1 nor in ``[0, E)``."""


class CapacityError(MoEError):
    """A rank was sent more rows than ``MoEConfig.capacity_factor`` allows."""


class PeerTimeoutError(MoEError):
    """A rank gave no sign of life for ``MoEConfig.timeout_s`` seconds."""


class PeerFailedError(MoEError):
    """A rank ended the call by an error of its own (out of memory, for example), which it reports itself."""


class PeerDiedError(MoEError):
    """The process of a rank ended, or left the job. Its EP group cannot be used any more."""


class ShapeMismatchError(MoEError):
    """The ranks of one EP group made calls of different shapes, or two processes claim to be the same rank."""


_TYPES = {
    cls.__name__: cls
    for cls in (RoutingError, CapacityError, PeerTimeoutError, PeerFailedError, PeerDiedError, ShapeMismatchError)
}
_TAG = re.compile(r"jax_mok (\w+): (.*)", re.DOTALL)


def as_typed(error: BaseException) -> MoEError | None:
    """The typed error that ``error`` (as JAX raised it) stands for, or ``None`` if it is not one of ours."""
    if isinstance(error, MoEError):
        return error
    found = _TAG.search(str(error))
    if found is None or found[1] not in _TYPES:
        return None
    return _TYPES[found[1]](found[2].strip())


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Within this context a run-time failure of the layer raises its typed error.

    JAX reports failures when a result is waited for, so wait inside the context::

        with mok.typed_errors():
            loss = jax.block_until_ready(train_step(...))
    """
    try:
        yield
    except Exception as error:
        typed = as_typed(error)
        if typed is None or typed is error:
            raise
        raise typed from error
