"""72 virtual CPU devices for the whole session: the largest mesh of an NVL72, on any machine."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=72"

import jax
import pytest


@pytest.fixture(autouse=True)
def poisoned_arenas():
    """Every test starts with NaN in all memory that a call must not rely on."""
    from jax_mok import runtime

    if runtime.load_error() is None:
        if runtime.native().held_bytes() > 2**26:
            runtime.release()
        runtime.native().poison_arenas()


@pytest.fixture
def quickly_compiled():
    """For large programs of XLA's whose results are compared within a tolerance: most of their time would be LLVM's.
    Not for what promises bits, and on CPUs alone: elsewhere speed may be what a test is about."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before or jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def no_implicit_promotion():
    """As users have it who forbid implicit promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def ranks():
    """``ranks(n)``: n EP ranks that share a GPU, made once for a module."""
    from cuda_ranks import Ranks

    made = {}
    return lambda n, **kwargs: made.setdefault((n, *kwargs.items()), Ranks(n, **kwargs))


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="run the tests marked soak, too: minutes on a GPU")


def pytest_collection_modifyitems(config, items):
    has_gpu = any(d.platform == "gpu" for d in jax.devices())
    for item in items:
        if item.get_closest_marker("soak") and not config.getoption("soak"):
            item.add_marker(pytest.mark.skip(reason="minutes on a GPU: run pytest --soak tests/test_cuda_soak.py"))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
