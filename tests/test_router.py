"""Routers and load balancing against float64 numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_reference import balancing_loss, relative_l2, sigmoid, softmax, top_ids
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok import router

pytestmark = pytest.mark.usefixtures("no_implicit_promotion")
B, S, E, K = 4, 96, 64, 6


def random_logits(seed: int = 0, *shape: int, std: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, std, shape or (B, S, E)).astype(np.float32)


def directional(f, x: np.ndarray, v: np.ndarray, eps: float = 1e-6) -> float:
    x = x.astype(np.float64)
    return float((f(x + eps * v) - f(x - eps * v)) / (2 * eps))


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_topk_is_softmax_then_topk(normalize):
    logits = random_logits()
    ids, weights, probs = router.softmax_topk(jnp.asarray(logits), K, normalize=normalize)
    want = softmax(logits.astype(np.float64))
    want_ids = top_ids(want, K)
    want_weights = np.take_along_axis(want, want_ids, -1)
    if normalize:
        want_weights = want_weights / want_weights.sum(-1, keepdims=True)
    assert (ids.dtype, weights.dtype, probs.dtype) == (jnp.int32, jnp.float32, jnp.float32)
    np.testing.assert_array_equal(ids, want_ids)
    assert relative_l2(weights, want_weights) < 1e-6
    assert relative_l2(probs, want) < 1e-6


def test_softmax_is_in_float32_for_bfloat16_logits():
    logits = jnp.asarray(random_logits(), jnp.bfloat16)
    _, weights, probs = router.softmax_topk(logits, K)
    assert weights.dtype == probs.dtype == jnp.float32
    assert relative_l2(probs, softmax(np.asarray(logits, np.float64))) < 1e-6


@pytest.mark.parametrize("topk", [router.softmax_topk, router.sigmoid_topk])
def test_equal_scores_go_to_experts_in_order(topk):
    ids = topk(jnp.zeros((3, E)), K).expert_ids
    np.testing.assert_array_equal(ids, np.tile(np.arange(K), (3, 1)))


def test_sigmoid_topk_selects_with_the_bias_and_weighs_without():
    logits = random_logits()
    bias = random_logits(1, E, std=0.2)
    ids, weights, probs = router.sigmoid_topk(jnp.asarray(logits), K, jnp.asarray(bias), scale=2.5)
    scores = sigmoid(logits.astype(np.float64))
    want_ids = top_ids(scores + bias, K)
    want = np.take_along_axis(scores, want_ids, -1)
    assert (want_ids != top_ids(scores, K)).any(), "the bias of this test must matter"
    np.testing.assert_array_equal(ids, want_ids)
    assert relative_l2(weights, 2.5 * want / want.sum(-1, keepdims=True)) < 1e-6
    assert relative_l2(probs, scores / scores.sum(-1, keepdims=True)) < 1e-6
    raw = router.sigmoid_topk(jnp.asarray(logits), K, jnp.asarray(bias), normalize=False).weights
    assert relative_l2(raw, want) < 1e-6


def test_group_limited_selection_is_deepseek_v3s():
    groups, top_groups = 8, 3
    logits = random_logits(2, 50, E)
    bias = random_logits(3, E, std=0.2)
    ids = router.sigmoid_topk(
        jnp.asarray(logits), K, jnp.asarray(bias), num_groups=groups, top_groups=top_groups
    ).expert_ids
    for t, ranking in enumerate(sigmoid(logits.astype(np.float64)) + bias):
        group_scores = np.sort(ranking.reshape(groups, -1), axis=-1)[:, -2:].sum(-1)
        allowed = np.repeat(np.isin(np.arange(groups), top_ids(group_scores, top_groups)), E // groups)
        np.testing.assert_array_equal(ids[t], top_ids(np.where(allowed, ranking, -np.inf), K))


def test_gradient_of_softmax_weights():
    logits, cotangent = random_logits(4, 40, E), random_logits(5, 40, K)
    v = random_logits(6, 40, E).astype(np.float64)
    ids = top_ids(logits, K)

    def f(a):
        w = np.take_along_axis(softmax(a), ids, -1)
        return (w / w.sum(-1, keepdims=True) * cotangent).sum()

    grad = jax.grad(lambda a: (router.softmax_topk(a, K).weights * cotangent).sum())(jnp.asarray(logits))
    assert np.vdot(grad, v) == pytest.approx(directional(f, logits, v), rel=1e-4)


def test_gradient_of_sigmoid_weights_and_none_for_the_bias():
    logits, cotangent = random_logits(4, 40, E), random_logits(5, 40, K)
    bias = random_logits(1, E, std=0.2)
    v = random_logits(6, 40, E).astype(np.float64)
    ids = top_ids(sigmoid(logits.astype(np.float64)) + bias, K)

    def f(a):
        w = np.take_along_axis(sigmoid(a), ids, -1)
        return (2.5 * w / w.sum(-1, keepdims=True) * cotangent).sum()

    def loss(a, b):
        return (router.sigmoid_topk(a, K, b, scale=2.5).weights * cotangent).sum()

    grad, bias_grad = jax.grad(loss, argnums=(0, 1))(jnp.asarray(logits), jnp.asarray(bias))
    assert np.vdot(grad, v) == pytest.approx(directional(f, logits, v), rel=1e-4)
    np.testing.assert_array_equal(bias_grad, np.zeros(E))


def test_weights_stay_finite_when_every_sigmoid_underflows():
    routing = router.sigmoid_topk(jnp.full((2, E), -200.0), K)
    assert np.isfinite(routing.weights).all()
    assert np.isfinite(routing.probs).all()


def test_load_balancing_loss_formula():
    logits = random_logits(7, 300, E)
    routing = router.softmax_topk(jnp.asarray(logits), K)
    got = router.load_balancing_loss(routing.probs, routing.expert_ids)
    want = balancing_loss(softmax(logits.astype(np.float64)), np.asarray(routing.expert_ids))
    assert got.dtype == jnp.float32
    assert float(got) == pytest.approx(want, rel=1e-5)


def test_load_balancing_loss_is_1_when_even_and_the_number_of_experts_when_all_tokens_choose_one_expert():
    ids = jnp.arange(E, dtype=jnp.int32).reshape(-1, 2)
    even = jnp.full((E // 2, E), 1 / E)
    assert float(router.load_balancing_loss(even, ids)) == pytest.approx(1, rel=1e-6)
    one = jnp.zeros((10, E)).at[:, 3].set(1)
    assert float(router.load_balancing_loss(one, jnp.full((10, 1), 3, jnp.int32))) == pytest.approx(E, rel=1e-6)


def test_load_balancing_loss_of_a_padded_batch_is_that_of_its_tokens():
    routing = router.softmax_topk(jnp.asarray(random_logits(8, 200, E)), K)
    ids = routing.expert_ids.at[150:].set(-1)
    got = router.load_balancing_loss(routing.probs, ids)
    want = balancing_loss(np.asarray(routing.probs[:150], np.float64), np.asarray(ids[:150]))
    assert float(got) == pytest.approx(want, rel=1e-5)
    grad = jax.grad(router.load_balancing_loss)(routing.probs, ids)
    np.testing.assert_array_equal(grad[150:], np.zeros((50, E)))
    load = np.bincount(np.asarray(ids[:150]).reshape(-1), minlength=E)
    assert relative_l2(grad[:150], np.tile(E * load / load.sum() / 150, (150, 1))) < 1e-5


def test_load_balancing_loss_of_no_routed_slot_is_zero():
    assert float(router.load_balancing_loss(jnp.full((5, E), 1 / E), jnp.full((5, K), -1, jnp.int32))) == 0


def test_router_z_loss_formula():
    logits = random_logits()
    want = np.mean(np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2)
    assert float(router.router_z_loss(jnp.asarray(logits))) == pytest.approx(want, rel=1e-5)


def test_expert_load_counts_slots_and_skips_minus_one():
    ids = np.random.default_rng(9).integers(-1, E, (B, S, K)).astype(np.int32)
    load = router.expert_load(jnp.asarray(ids), E)
    assert load.dtype == jnp.int32
    np.testing.assert_array_equal(load, np.bincount(ids[ids >= 0], minlength=E))


def test_update_selection_bias_formula():
    bias = jnp.asarray(random_logits(10, E))
    load = np.random.default_rng(11).integers(0, 100, E).astype(np.int32)
    load[0] = load[1:].sum() // (E - 1)
    got = router.update_selection_bias(bias, jnp.asarray(load), rate=0.01)
    assert got.dtype == bias.dtype
    assert relative_l2(got, np.asarray(bias, np.float64) + 0.01 * np.sign(load.mean() - load)) < 1e-7
    even = router.update_selection_bias(bias, jnp.full(E, 7, jnp.int32))
    np.testing.assert_array_equal(even, bias)


def test_the_selection_bias_evens_out_a_skewed_load():
    logits = jnp.asarray(random_logits(12, 512, 16) + np.linspace(-2, 2, 16, dtype=np.float32))

    def step(bias, _):
        load = router.expert_load(router.sigmoid_topk(logits, 2, bias).expert_ids, 16)
        return router.update_selection_bias(bias, load, rate=0.01), load.max().astype(jnp.float32) / load.mean()

    _, imbalance = jax.lax.scan(step, jnp.zeros(16), None, length=200)
    assert imbalance[0] > 2
    assert imbalance[-1] < 1.2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_over_tokens(kind):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "expert"), axis_types=(kind,) * 2)
    logits = random_logits(13, 8, 48, E)
    bias = random_logits(1, E, std=0.2)

    def f(logits, bias):
        routing = router.sigmoid_topk(logits, K, bias, num_groups=8, top_groups=4)
        loss = router.load_balancing_loss(routing.probs, routing.expert_ids) + router.router_z_loss(logits)
        return loss + (routing.weights**2).sum(), (routing.expert_ids, router.expert_load(routing.expert_ids, E))

    value_and_grad = jax.jit(jax.value_and_grad(f, has_aux=True))
    (want, (want_ids, want_load)), want_grad = value_and_grad(logits, bias)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(logits, NamedSharding(mesh, P(("data", "expert"))))
        (got, (ids, load)), grad = value_and_grad(sharded, bias)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(load, want_load)
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    assert relative_l2(grad, want_grad) < 1e-5
    assert load.sharding.is_fully_replicated
    assert grad.sharding.shard_shape(grad.shape) == (1, 48, E)


@pytest.mark.parametrize("topk", [router.softmax_topk, router.sigmoid_topk])
@pytest.mark.parametrize("k", [0, -1, 9])
def test_k_outside_its_range_is_refused(topk, k):
    with pytest.raises(ValueError, match=rf"{k} experts per token .* with 8"):
        topk(jnp.zeros((2, 8)), k)


def test_other_misfits_are_refused_with_their_numbers():
    logits = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match=r"\[8\].*\[4\]"):
        router.sigmoid_topk(logits, 2, jnp.zeros(4))
    with pytest.raises(ValueError, match="8 experts do not form 3 groups"):
        router.sigmoid_topk(logits, 2, num_groups=3, top_groups=1)
    with pytest.raises(ValueError, match=r"top_groups = 5 must be 1 .. num_groups = 4"):
        router.sigmoid_topk(logits, 2, num_groups=4, top_groups=5)
    with pytest.raises(ValueError, match="3 experts per token cannot come from 1 groups of 2"):
        router.sigmoid_topk(logits, 3, num_groups=4, top_groups=1)
    with pytest.raises(ValueError, match=r"\[8\] and \[4\]"):
        router.update_selection_bias(jnp.zeros(8), jnp.zeros(4))
    with pytest.raises(ValueError, match="scalar"):
        router.softmax_topk(jnp.float32(1), 1)
