"""The CUDA kernels on all GPUs of this process, through JAX: the bits of one GPU, faults, other work beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_cases import (
    assert_accurate,
    assert_same_bits,
    make_inputs,
    mesh_of,
    oracle,
    rel_l2,
    run_layer,
    with_master_weights,
)

import jax_mok as mok

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(jax.local_device_count() < 2 or jax.default_backend() != "gpu", reason="needs two NVIDIA GPUs"),
]

SAVE, RECOMPUTE = (mok.MoEConfig(backend="cuda", residuals=mode, timeout_s=5) for mode in ("save", "recompute"))
SIZES = [n for n in (2, 4, 8) if n <= jax.local_device_count()]


@pytest.fixture(autouse=True)
def raised_where_they_happened():
    """A failure that no later call of a test has raised is this test's."""
    yield
    with mok.typed_errors():
        run_layer(make_inputs(16, 64, 72, 8, 2, dtype="bfloat16"), mesh_of(SIZES[-1]), SAVE)


@pytest.mark.parametrize("config", [SAVE, RECOMPUTE], ids=["save", "recompute"])
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "K", "shared"),
    [(512, 256, 136, 8, 2, 0), (1544, 512, 264, 16, 6, 200), (64, 40, 72, 8, 2, 0), (8192, 1024, 512, 64, 8, 0)],
)
def test_any_number_of_gpus_gives_the_same_bits(T, H, I, E, K, shared, config):
    inputs = make_inputs(T, H, I, E, K, dtype="bfloat16", shared=shared, seed=T)
    alone = run_layer(inputs, None, config)
    assert_accurate(alone, oracle(inputs), "bfloat16")
    for n in SIZES:
        found = run_layer(inputs, mesh_of(n), config)
        assert_accurate(found, oracle(inputs), "bfloat16")
        assert_same_bits(found[:4], alone[:4])


def test_float32_weight_gradients_too():
    inputs, _ = with_master_weights(512, 256, 136, 8, 2)
    alone = run_layer(inputs, None, SAVE)
    for n in SIZES:
        assert_same_bits(run_layer(inputs, mesh_of(n), SAVE)[:4], alone[:4])


@pytest.mark.parametrize("n", SIZES)
def test_bad_ids_are_raised_once_and_the_next_call_is_right(n):
    good, bad = (make_inputs(64, 256, 128, 8, 2, dtype="bfloat16") for _ in range(2))
    bad.ids[-1, 1] = 8
    mesh = mesh_of(n)
    f = jax.jit(lambda x, i, w, e: mok.moe(x, i, w, e, mesh=mesh, config=SAVE))
    y = f(*map(jnp.asarray, bad[:3]), jax.tree.map(jnp.asarray, bad.experts))
    assert np.isnan(np.asarray(y, np.float32)).all()
    args = (*map(jnp.asarray, good[:3]), jax.tree.map(jnp.asarray, good.experts))
    with pytest.raises(mok.RoutingError, match="expert id 8"), mok.typed_errors():
        jax.block_until_ready(f(*args))
    assert rel_l2(f(*args), oracle(good).y) <= 4e-3


def test_without_an_exchange_all_gpus_of_a_program_raise():
    """Each GPU has all experts; a GPU that raised alone would leave the others waiting in the sum over them."""
    n = SIZES[-1]
    good, bad = (make_inputs(64 * n, 256, 128, 8, 2, dtype="bfloat16") for _ in range(2))
    bad.ids[-1, 1] = 8
    mesh = mesh_of(n, names=("data",))
    spread = jax.NamedSharding(mesh, P("data"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data"), P("data"), P()), out_specs=P())
    def mean(x, ids, weights, experts):
        y = mok.local_moe(x, ids, weights, experts, axis=None, config=SAVE)
        return jax.lax.pmean(y.astype(jnp.float32).mean(0), "data")

    def run(inputs):
        with mok.typed_errors():
            return np.asarray(
                mean(*jax.device_put(tuple(inputs[:3]), spread), jax.tree.map(jnp.asarray, inputs.experts))
            )

    want = run(good)
    assert np.isnan(run(bad)).all()
    with pytest.raises(mok.RoutingError, match="expert id 8"):
        run(good)
    for _ in range(3):
        np.testing.assert_array_equal(run(good), want)


def test_the_same_bits_beside_matmuls_all_reduces_and_new_kernels():
    """Kernels that are loaded while calls are under way, too: CUDA loads them when they are first launched."""
    mesh = mesh_of(SIZES[-1])
    inputs = jax.tree.map(jnp.asarray, make_inputs(4096, 512, 256, 16, 4, dtype="bfloat16"))
    step = jax.jit(lambda x: mok.moe(x, *inputs[1:4], mesh=mesh, config=SAVE))
    want = np.asarray(step(inputs.x))
    spread = jax.device_put(jnp.ones((mesh.size, 1024, 1024), jnp.bfloat16), jax.NamedSharding(mesh, P("expert")))
    busy = jax.jit(lambda a: jnp.einsum("pij,pjk->ik", a, a))
    for i in range(100):
        y = step(inputs.x)
        other = busy(spread)
        if i % 10 == 0:
            other = jax.jit(lambda a, i=i: jnp.roll(a, i + 1) * (i + 2))(other)
        assert_same_bits(step(inputs.x), want)
        assert_same_bits(y, want)
        other.block_until_ready()
