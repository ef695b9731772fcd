"""The CUDA kernels with several EP ranks, all on one GPU: exchange, bits for any number of ranks, faults."""

import time

import numpy as np
import pytest
from cuda_ranks import routes
from layer_cases import assert_same_bits, make_inputs, oracle, rel_l2

pytestmark = pytest.mark.gpu

RANKS = [1, 2, 4]
TIMEOUT, BAD_ID, CAPACITY = 3, 1, 2


def check(inputs, y, stats, ranks):
    E = len(inputs.experts.gate)
    assert rel_l2(y, oracle(inputs).y) <= 4e-3
    per_expert = np.bincount(inputs.ids[inputs.ids >= 0], minlength=E)
    for got in stats:
        np.testing.assert_array_equal(got[0], per_expert)
        np.testing.assert_array_equal(got[1], per_expert.reshape(ranks, -1).sum(1))
        assert got[2] == 0


@pytest.mark.parametrize("route", routes(4, 2, 8))
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "K", "shared"),
    [(508, 256, 136, 8, 2, 0), (1540, 512, 264, 16, 6, 200), (4, 64, 72, 8, 2, 64), (4096, 1024, 512, 64, 8, 0)],
)
def test_any_number_of_ranks_gives_the_same_bits(ranks, T, H, I, E, K, shared, route):
    inputs = make_inputs(T, H, I, E, K, dtype="bfloat16", shared=shared, ids=routes(T, K, E)[route], seed=T)
    y = {}
    for P in RANKS:
        y[P], stats = ranks(P).call(inputs).run()
        check(inputs, y[P], stats, P)
        assert all(f[0] == 0 for f in ranks(P).failures())
    for P in RANKS[1:]:
        assert_same_bits(y[P], y[1])


def test_many_slots_a_token(ranks):
    inputs = make_inputs(64, 256, 64, 40, 40, dtype="bfloat16")
    for P in RANKS:
        check(inputs, *ranks(P).call(inputs).run(), P)


def test_one_cluster_is_enough(ranks):
    inputs = make_inputs(512, 256, 136, 8, 4, dtype="bfloat16", shared=64)
    want, _ = ranks(1).call(inputs).run()
    for P in RANKS:
        y, _ = ranks(P, multiprocessors=2).call(inputs).run()
        assert_same_bits(y, want)


@pytest.mark.parametrize("P", RANKS)
def test_many_calls_with_other_routes(ranks, P):
    calls, wants = [], []
    for seed in range(4):
        inputs = make_inputs(1024, 256, 128, 16, 4, dtype="bfloat16", seed=seed)
        calls.append(ranks(P).call(inputs))
        wants.append(ranks(1).call(inputs).run()[0])
    for i in range(200):
        order = np.roll(range(P), i)
        calls[i % 4].launch(order)
        if i % 20 == 19:
            ranks(P).wait()
            for call, want in zip(calls, wants, strict=True):
                assert_same_bits(call.results()[0], want)


def test_shapes_take_turns_in_one_arena(ranks):
    big = make_inputs(1024, 512, 128, 16, 4, dtype="bfloat16")
    small = make_inputs(64, 128, 64, 4, 2, dtype="bfloat16", seed=1)
    calls = [(inputs, ranks(2).call(inputs)) for inputs in (small, big)]
    for inputs, call in calls * 3:
        check(inputs, *call.run(), 2)


def assert_failed(of, call, code, rank):
    y, _ = call.results()
    assert np.isnan(np.asarray(y, np.float32)).all()
    failures = of.failures()
    assert all(f[0] == code and f[1] == rank for f in failures), failures
    return failures


@pytest.mark.parametrize("P", RANKS)
def test_bad_ids_fail_on_every_rank_and_the_next_call_is_right(ranks, P):
    good, bad = (make_inputs(256, 256, 128, 8, 2, dtype="bfloat16", seed=3) for _ in range(2))
    bad.ids[-1, 1] = 8
    call = ranks(P).call(bad)
    _, stats = call.run()
    T = 256 // P
    for failure in assert_failed(ranks(P), call, BAD_ID, P - 1):
        assert failure[2:] == (T - 1 << 20 | 1, 8 << 32 | 8)  # token and slot, number of experts and id
    assert all(s[2] == BAD_ID for s in stats)
    check(good, *ranks(P).call(good).run(), P)


@pytest.mark.parametrize("P", RANKS)
def test_over_capacity(ranks, P):
    inputs = make_inputs(256, 256, 128, 8, 2, dtype="bfloat16", ids=np.full((256, 2), 7))
    call = ranks(P).call(inputs, capacity=500)
    call.run()
    for failure in assert_failed(ranks(P), call, CAPACITY, P - 1):
        assert failure[2:] == (512, 500)
    check(inputs, *ranks(P).call(inputs).run(), P)


@pytest.mark.parametrize(("P", "missing"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_that_never_comes(ranks, P, missing):
    inputs = make_inputs(256, 256, 128, 8, 2, dtype="bfloat16")
    of = ranks(P)
    call = of.call(inputs, timeout_s=0.5, absent=(missing,))
    call.run()
    failures = of.failures()
    assert [f[:3] for r, f in enumerate(failures) if r != missing] == [(TIMEOUT, missing, 1)] * (P - 1)
    y, _ = call.results()
    assert np.isnan(np.asarray(y, np.float32)).all()  # the missing rank's buffer is poisoned with NaN, too
    for _ in range(3):
        check(inputs, *of.call(inputs).run(), P)


def test_a_rank_that_comes_too_late(ranks):
    inputs = make_inputs(256, 256, 128, 8, 2, dtype="bfloat16")
    of = ranks(2)
    of.call(inputs, timeout_s=0.3, absent=(1,)).run()
    of.generation -= 1
    call = of.call(inputs, timeout_s=20, absent=(0,))
    call.run()
    assert_failed(of, call, TIMEOUT, 1)
    check(inputs, *of.call(inputs).run(), 2)


@pytest.mark.parametrize("P", RANKS[1:])
def test_calls_queued_behind_a_failure_end_with_it(ranks, P):
    good, bad = (make_inputs(256, 256, 128, 8, 2, dtype="bfloat16", seed=3) for _ in range(2))
    bad.ids[-1, 1] = 8
    of = ranks(P)
    calls = [of.call(inputs) for inputs in (bad, good, good)]
    of.acknowledged = of.generation  # the host has not heard of what will go wrong
    start = time.monotonic()
    for call in calls:
        call.launch()
    of.wait()
    assert time.monotonic() - start < 5
    for call in calls:
        y, stats = call.results()
        assert np.isnan(np.asarray(y, np.float32)).all()
        assert all(s[2] != 0 for s in stats)
    assert all(f[:2] == (BAD_ID, P - 1) for f in of.failures())  # the first failure is the one that is told
    of.acknowledged = None
    check(good, *calls[1].run(), P)


def test_a_rank_that_misses_a_call_and_comes_to_the_next(ranks):
    inputs = make_inputs(256, 256, 128, 8, 2, dtype="bfloat16")
    of = ranks(2)
    first, second = of.call(inputs, timeout_s=0.5, absent=(1,)), of.call(inputs)
    of.acknowledged = of.generation
    start = time.monotonic()
    first.launch()
    second.launch()
    of.wait()
    assert time.monotonic() - start < 5
    assert np.isnan(np.asarray(second.results()[0], np.float32)).all()
    assert of.failures()[0][:2] == (TIMEOUT, 1)
    of.acknowledged = None
    check(inputs, *second.run(), 2)
