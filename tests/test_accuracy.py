"""The layer computes what it says: every tensor against the float64 oracle, on every backend."""

import numpy as np
import pytest
from layer_cases import (
    assert_accurate,
    assert_rounds_to,
    assert_same_bits,
    layer_step,
    make_inputs,
    mesh_of,
    oracle,
    run_layer,
    with_master_weights,
)

import jax_mok as mok

pytestmark = pytest.mark.usefixtures("quickly_compiled")
BACKENDS = ["cpu", "xla", "reference"]
DTYPES = ["bfloat16", "float32"]


def check(inputs, dtype, mesh=None, backend="cpu", residuals="save", **kwargs):
    config = mok.MoEConfig(backend=backend, residuals=residuals)
    assert_accurate(run_layer(inputs, mesh, config, **kwargs), oracle(inputs), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 2, 6, 8, 16, 24])
def test_top_k_up_to_all_experts(K, dtype):
    check(make_inputs(64, 96, 80, 24, K, dtype=dtype, seed=K), dtype, mesh_of(4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "I"), [(130, 200), (33, 7), (128, 192), (257, 129)])
def test_widths_that_are_no_multiple_of_anything(H, I, dtype, backend):
    check(make_inputs(40, H, I, 8, 2, dtype=dtype, shared=I + 3, seed=H), dtype, mesh_of(2), backend)


@pytest.mark.parametrize(("H", "I"), [(1, 1), (1, 40), (40, 1)])
def test_widths_of_one(H, I):
    check(make_inputs(40, H, I, 8, 2, shared=1), "float32", mesh_of(2))


@pytest.mark.parametrize("H", [2880, 3584])
def test_wide_hidden_sizes_of_real_models(H):
    check(make_inputs(32, H, 192, 4, 2, dtype="bfloat16"), "bfloat16", mesh_of(2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 7, 17, 127, 128, 129, 257, 511])
def test_token_counts(T, backend):
    check(make_inputs(T, 96, 128, 8, 3, dtype="bfloat16", shared=32, seed=T), "bfloat16", None, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("P", [1, 2, 8])
def test_shared_expert_of_its_own_width(P, residuals, dtype):
    inputs = make_inputs(104, 96, 72, 16, 4, dtype=dtype, shared=200, seed=P)
    check(inputs, dtype, mesh_of(P), residuals=residuals)


ROUTES = {
    "all to the first expert": lambda T, K, E, P: np.zeros((T, K)),
    "all to the last expert": lambda T, K, E, P: np.full((T, K), E - 1),
    "no expert at all": lambda T, K, E, P: np.full((T, K), -1),
    "interleaved empty experts": lambda T, K, E, P: np.arange(T * K).reshape(T, K) % (E // 2) * 2,
    "first third of the experts only": lambda T, K, E, P: np.arange(T * K).reshape(T, K) % (E // 3),
    "one rank receives nothing": lambda T, K, E, P: E // P + np.arange(T * K).reshape(T, K) % (E - E // P),
    "the last rank receives nothing": lambda T, K, E, P: np.arange(T * K).reshape(T, K) % (E - E // P),
    "the same id in every slot": lambda T, K, E, P: np.repeat(np.arange(T)[:, None] % E, K, 1),
    "one token with real routes": lambda T, K, E, P: np.where(np.arange(T)[:, None] == 5, np.arange(K)[None], -1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("P", [1, 4])
@pytest.mark.parametrize("routes", ROUTES)
def test_routes(routes, P, backend):
    T, E, K = 132, 24, 4
    ids = ROUTES[routes](T, K, E, max(P, 2))
    for dtype in DTYPES if backend == "cpu" else DTYPES[:1]:
        check(make_inputs(T, 72, 56, E, K, dtype=dtype, ids=ids, seed=P), dtype, mesh_of(P), backend)


def test_many_tiny_groups_repeatedly():
    inputs = make_inputs(64, 128, 128, 384, 6, dtype="bfloat16")
    want, step = oracle(inputs), layer_step(inputs, mesh_of(8))
    first = step()
    assert_accurate(first, want, "bfloat16")
    for _ in range(200):
        assert_same_bits(step(), first)


@pytest.mark.parametrize("T", [65536, 131072])
def test_as_many_tokens_as_a_long_context_batch(T):
    check(make_inputs(T, 256, 16, 8, 2, dtype="bfloat16"), "bfloat16", mesh_of(8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions(backend):
    inputs = make_inputs(24, 40, 24, 8, 2)
    want = oracle(inputs)
    for lead in [(4, 6), (2, 3, 4), (1, 24)]:
        shaped = inputs._replace(**{f: getattr(inputs, f).reshape(*lead, -1) for f in ("x", "ids", "weights", "dy")})
        got = run_layer(shaped, mesh_of(4), mok.MoEConfig(backend=backend))
        assert got.y.shape == (*lead, 40)
        flat = got._replace(y=got.y.reshape(24, -1), dx=got.dx.reshape(24, -1), dw=got.dw.reshape(24, -1))
        assert_accurate(flat, want, "float32")


def test_gradient_dtypes_are_the_primal_dtypes():
    got = run_layer(make_inputs(16, 32, 24, 4, 2, dtype="bfloat16", shared=16), mesh_of(2))
    assert got.y.dtype == got.dx.dtype == "bfloat16"
    assert got.dw.dtype == "float32"
    assert {a.dtype.name for a in (*got.experts, *got.shared)} == {"bfloat16"}


@pytest.mark.parametrize(("backend", "residuals"), [("cpu", "recompute"), *((backend, "save") for backend in BACKENDS)])
@pytest.mark.parametrize("P", [1, 4])
def test_master_weights(P, backend, residuals):
    wide, low = with_master_weights(
        104, 130, 72, 24, 4, shared=200, ids=ROUTES["interleaved empty experts"](104, 4, 24, P)
    )
    config = mok.MoEConfig(backend=backend, residuals=residuals)
    got = run_layer(wide, mesh_of(P), config)
    assert_accurate(got, oracle(low), "bfloat16")
    want = run_layer(low, mesh_of(P), config)
    if P > 1:  # XLA sums the shared expert's gradients over ranks: in float32 for the one, in bfloat16 for the other
        got, want = got._replace(shared=None), want._replace(shared=None)
    assert_rounds_to(got, want)


def test_router_weight_gradient_at_zero_and_below():
    inputs = make_inputs(48, 64, 48, 8, 4)
    inputs.weights[::3] = 0.0
    inputs.weights[1::3] = -np.abs(inputs.weights[1::3])
    check(inputs, "float32", mesh_of(4))
