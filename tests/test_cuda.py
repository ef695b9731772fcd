"""The CUDA kernels on one GPU: accuracy, bits, faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import (
    assert_accurate,
    assert_rounds_to,
    assert_same_bits,
    make_inputs,
    oracle,
    rel_l2,
    run_layer,
    with_master_weights,
)

import jax_mok as mok

pytestmark = pytest.mark.gpu

CUDA = mok.MoEConfig(backend="cuda")


def forward(inputs, config=CUDA):
    f = jax.jit(lambda x, i, w, e, s: mok.moe(x, i, w, e, shared=s, config=config, with_stats=True))
    args = jax.tree.map(jnp.asarray, inputs[:5])
    return lambda: jax.block_until_ready(f(*args))


SHAPES = [
    (1, 64, 64, 16, 1, 0),
    (17, 136, 200, 16, 16, 0),
    (257, 512, 264, 24, 6, 72),
    (1000, 1024, 768, 64, 8, 512),
    (130, 257, 129, 40, 40, 33),
    (65, 33, 7, 5, 2, 0),
]


@pytest.mark.parametrize(("T", "H", "I", "E", "K", "shared"), SHAPES)
def test_accuracy(T, H, I, E, K, shared):
    inputs = make_inputs(T, H, I, E, K, dtype="bfloat16", shared=shared, seed=T)
    y, stats = forward(inputs)()
    assert rel_l2(y, oracle(inputs).y) <= 4e-3
    np.testing.assert_array_equal(stats.tokens_per_expert, np.bincount(inputs.ids[inputs.ids >= 0], minlength=E))


@pytest.mark.parametrize(
    "ids", [np.zeros((300, 4)), np.full((300, 4), 23), np.full((300, 4), -1), np.arange(1200).reshape(300, 4) % 12 * 2]
)
def test_routes(ids):
    inputs = make_inputs(300, 256, 128, 24, 4, dtype="bfloat16", ids=ids)
    assert rel_l2(forward(inputs)()[0], oracle(inputs).y) <= 4e-3


@pytest.mark.parametrize(("T", "H", "I", "E", "K", "shared"), SHAPES)
def test_gradients(T, H, I, E, K, shared):
    inputs = make_inputs(T, H, I, E, K, dtype="bfloat16", shared=shared, seed=T)
    assert_accurate(run_layer(inputs, None, CUDA), oracle(inputs), "bfloat16")


@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize(("T", "H", "I", "E", "K", "shared"), SHAPES)
def test_master_weights(T, H, I, E, K, shared, residuals):
    wide, low = with_master_weights(T, H, I, E, K, shared=shared, seed=T)
    config = mok.MoEConfig(backend="cuda", residuals=residuals)
    got = run_layer(wide, None, config)
    assert_accurate(got, oracle(low), "bfloat16")
    assert_rounds_to(got, run_layer(low, None, config))


def test_saved_and_recomputed_residuals_give_the_same_bits():
    inputs = make_inputs(300, 264, 136, 12, 3, dtype="bfloat16", shared=72)
    saved, recomputed = (
        run_layer(inputs, None, mok.MoEConfig(backend="cuda", residuals=mode)) for mode in ("save", "recompute")
    )
    assert_same_bits(saved, recomputed)


def test_the_same_bits_beside_other_work():
    inputs = make_inputs(2048, 1024, 512, 32, 8, dtype="bfloat16")
    step = forward(inputs)
    want, _ = step()
    a = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.bfloat16)
    busy = jax.jit(lambda a: a @ a)
    for _ in range(200):
        other = busy(a)
        assert_same_bits(step()[0], want)
        other.block_until_ready()


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (4, 1)])
def test_a_bad_id_is_nan_now_and_a_typed_error_in_the_next_call(experts, top_k):
    """Which may be one of another layer, and says what was wrong with the first one."""
    bad = make_inputs(64, 256, 128, 8, 2, dtype="bfloat16")
    good = make_inputs(64, 256, 128, experts, top_k, dtype="bfloat16")
    bad.ids[37, 1] = 99
    y, stats = forward(bad)()
    assert int(stats.status) == 1
    assert np.isnan(np.asarray(y, np.float32)).all()
    with pytest.raises(mok.RoutingError, match=r"id 99 in slot 1 of token 37 .*\[0, 8\)"), mok.typed_errors():
        forward(good)()
    assert rel_l2(forward(good)()[0], oracle(good).y) <= 4e-3


def test_over_capacity():
    inputs = make_inputs(64, 256, 128, 8, 2, dtype="bfloat16")
    config = mok.MoEConfig(backend="cuda", capacity_factor=0.5)
    y, stats = forward(inputs, config)()
    assert int(stats.status) == 2
    assert np.isnan(np.asarray(y, np.float32)).all()
    with pytest.raises(mok.CapacityError), mok.typed_errors():
        forward(inputs)()
    assert rel_l2(forward(inputs)()[0], oracle(inputs).y) <= 4e-3


def test_scan_over_layers():
    inputs = jax.tree.map(jnp.asarray, make_inputs(256, 256, 128, 8, 2, dtype="bfloat16"))

    def layer(x, _):
        y = mok.moe(x, inputs.ids, inputs.weights, inputs.experts, config=CUDA)
        return (x + y) / 2, y

    once = jax.jit(lambda x: layer(x, None))
    x = inputs.x
    _, ys = jax.jit(lambda x: jax.lax.scan(layer, x, None, length=6))(x)
    for y in ys:
        x, want = once(x)
        assert rel_l2(y, want) <= 1e-2
