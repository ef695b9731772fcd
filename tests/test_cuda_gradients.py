"""The backward kernel with several EP ranks, all on one GPU: accuracy, bits for any number of ranks, faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_ranks import routes
from layer_cases import assert_same_bits, make_inputs, oracle, rel_l2

pytestmark = pytest.mark.gpu

RANKS = [1, 2, 4]
LIMIT = 6e-3
TIMEOUT, BAD_ID = 3, 1


def with_odd_weights(inputs):
    """Some router weights zero, some negative."""
    rng = np.random.default_rng(7)
    signs = rng.choice([0.0, -1.0, 1.0], inputs.weights.shape, p=[0.1, 0.1, 0.8])
    return inputs._replace(weights=(inputs.weights * signs).astype(np.float32))


def check(want, found):
    dx, dw, experts, shared = found
    errors = {"dx": rel_l2(dx, want.dx), "dw": rel_l2(dw, want.dw)}
    for name, got, right in zip(("gate", "up", "down"), experts, want.experts, strict=True):
        errors[name] = max(rel_l2(got[e], right[e]) for e in range(len(right)))
    if shared:
        for i, name in enumerate(("shared gate", "shared up", "shared down")):
            errors[name] = rel_l2(sum(np.asarray(r[i], np.float64) for r in shared), want.shared[i])
    if np.count_nonzero(want.dw) < 10:  # a product of two long vectors may nearly cancel
        assert errors.pop("dw") <= 10 * LIMIT, errors
    assert max(errors.values()) <= LIMIT, errors


@pytest.mark.parametrize("route", routes(4, 2, 8))
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "K", "shared"),
    [(508, 256, 136, 8, 2, 0), (1540, 512, 264, 16, 6, 200), (4, 64, 72, 8, 2, 64), (4096, 1024, 512, 64, 8, 0)],
)
def test_any_number_of_ranks_gives_the_same_bits(ranks, T, H, I, E, K, shared, route):
    ids = routes(T, K, E)[route]
    inputs = with_odd_weights(make_inputs(T, H, I, E, K, dtype="bfloat16", shared=shared, ids=ids, seed=T))
    found, want = {}, oracle(inputs)
    for P in RANKS:
        found[P] = ranks(P).gradients(inputs).run()
        check(want, found[P])
        assert all(f[0] == 0 for f in ranks(P).failures())
    for P in RANKS[1:]:
        assert_same_bits(found[P][:3], found[1][:3])


@pytest.mark.parametrize("route", ["spread", "even experts", "none"])
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "K", "shared"), [(1540, 512, 264, 16, 6, 200), (508, 264, 136, 8, 2, 0), (4, 64, 72, 8, 2, 64)]
)
def test_float32_weight_gradients(ranks, T, H, I, E, K, shared, route):
    ids = routes(T, K, E)[route]
    inputs = with_odd_weights(make_inputs(T, H, I, E, K, dtype="bfloat16", shared=shared, ids=ids, seed=T))
    found, want = {}, oracle(inputs)
    for P in RANKS:
        found[P] = ranks(P).gradients(inputs, weight_grads=jnp.float32).run()
        check(want, found[P])
        assert {g.dtype.name for g in jax.tree.leaves(found[P][2:])} == {"float32"}
        rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16), found[P][2:])
        assert_same_bits((*found[P][:2], *rounded), ranks(P).gradients(inputs).run())
        saved = ranks(P).call(inputs, save=True)
        saved.run()
        assert_same_bits(ranks(P).gradients(inputs, saved=saved, weight_grads=jnp.float32).run(), found[P])
    for P in RANKS[1:]:
        assert_same_bits(found[P][:3], found[1][:3])


def test_many_slots_a_token(ranks):
    inputs = make_inputs(64, 256, 64, 40, 40, dtype="bfloat16")
    for P in RANKS:
        check(oracle(inputs), ranks(P).gradients(inputs).run())


@pytest.mark.parametrize("P", RANKS)
def test_saved_residuals_give_the_same_bits(ranks, P):
    inputs = with_odd_weights(make_inputs(1540, 512, 264, 16, 6, dtype="bfloat16", shared=200))
    want_y, _ = ranks(P).call(inputs).run()
    want = ranks(P).gradients(inputs).run()
    forward = ranks(P).call(inputs, save=True)
    assert_same_bits(forward.run()[0], want_y)
    assert_same_bits(ranks(P).gradients(inputs, saved=forward).run(), want)


def test_one_cluster_is_enough(ranks):
    inputs = make_inputs(512, 256, 136, 8, 4, dtype="bfloat16", shared=64)
    want = ranks(1).gradients(inputs).run()
    for P in RANKS:
        assert_same_bits(ranks(P, multiprocessors=2).gradients(inputs).run()[:3], want[:3])


@pytest.mark.parametrize("P", RANKS)
def test_many_calls_of_both_passes(ranks, P):
    forwards, backwards, ys, grads = [], [], [], []
    for seed in range(3):
        inputs = make_inputs(1024, 256, 128, 16, 4, dtype="bfloat16", seed=seed)
        forwards.append(ranks(P).call(inputs))
        backwards.append(ranks(P).gradients(inputs))
        ys.append(ranks(1).call(inputs).run()[0])
        grads.append(ranks(1).gradients(inputs).run())
    for i in range(100):
        order = np.roll(range(P), i).tolist()
        forwards[i % 3].launch(order)
        backwards[(i + i // 7) % 3].launch(order)
        if i % 20 == 19:
            ranks(P).wait()
            for call, want in zip(forwards, ys, strict=True):
                assert_same_bits(call.results()[0], want)
            for call, want in zip(backwards, grads, strict=True):
                assert_same_bits(call.results()[:3], want[:3])


def assert_failed(of, call, code, rank):
    assert all(np.isnan(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(call.results()))
    failures = of.failures()
    assert all(f[0] == code and f[1] == rank for r, f in enumerate(failures) if r not in call.absent), failures


@pytest.mark.parametrize("weight_grads", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("P", RANKS)
def test_bad_ids_fail_on_every_rank_and_the_next_call_is_right(ranks, P, weight_grads):
    good, bad = (make_inputs(256, 256, 128, 8, 2, dtype="bfloat16", shared=64, seed=3) for _ in range(2))
    bad.ids[-1, 1] = 8
    call = ranks(P).gradients(bad, weight_grads=weight_grads)
    call.run()
    assert_failed(ranks(P), call, BAD_ID, P - 1)
    check(oracle(good), ranks(P).gradients(good, weight_grads=weight_grads).run())


@pytest.mark.parametrize(("P", "missing"), [(2, 0), (4, 2)])
def test_a_rank_that_never_comes(ranks, P, missing):
    inputs = make_inputs(256, 256, 128, 8, 2, dtype="bfloat16")
    call = ranks(P).gradients(inputs, timeout_s=0.5, absent=(missing,))
    call.run()
    assert_failed(ranks(P), call, TIMEOUT, missing)  # the missing rank's buffers are poisoned with NaN, too
    check(oracle(inputs), ranks(P).gradients(inputs).run())
