"""Inputs that come with another sharding than the layer's, and delays that must not show."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layer_cases import assert_accurate, assert_same_bits, make_inputs, mesh_of, oracle, rel_l2, run_layer

import jax_mok as mok

REPLICATED = P()


def place(inputs, mesh, tokens=REPLICATED, experts=REPLICATED, shared=REPLICATED):
    def put(a, spec):
        return jax.device_put(jnp.asarray(a), jax.NamedSharding(mesh, spec))

    return inputs._replace(
        x=put(inputs.x, tokens),
        experts=mok.Experts(*(put(w, experts) for w in inputs.experts)),
        shared=inputs.shared and mok.Experts(*(put(w, shared) for w in inputs.shared)),
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("tokens", "experts", "shared"),
    [
        (P("data"), P("expert", "data"), P("data")),  # FSDP: weights sharded on their rows over data
        (P(("data", "expert")), P("expert", None, "model"), P(None, "model")),
        (P(None, "model"), P(), P()),
        (P(), P("data"), P()),
    ],
)
def test_any_sharding_of_the_inputs(tokens, experts, shared, axis_type):
    mesh = mesh_of(2, 2, 2, names=("data", "expert", "model"), axis_type=axis_type)
    inputs = make_inputs(64, 48, 32, 8, 2, shared=16)
    got = run_layer(place(inputs, mesh, tokens, experts, shared), mesh)
    assert_accurate(got, oracle(inputs), "float32")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sequences_that_do_not_divide_by_batch(axis_type):
    inputs = make_inputs(24, 48, 32, 8, 2)
    shaped = inputs._replace(**{f: getattr(inputs, f).reshape(3, 8, -1) for f in ("x", "ids", "weights", "dy")})
    got = run_layer(shaped, mesh_of(4, axis_type=axis_type))
    assert rel_l2(got.y.reshape(24, 48), oracle(inputs).y) <= 2e-6


def test_every_expert_is_computed_with_its_own_weights():
    base = make_inputs(16, 48, 32, 16, 1, ids=np.arange(16)[:, None])
    scaled = base._replace(
        x=np.repeat(base.x[:1], 16, 0),
        experts=mok.Experts(*(np.arange(1, 17, dtype=np.float32)[:, None, None] * w[:1] for w in base.experts)),
    )
    got = run_layer(scaled, mesh_of(4))
    assert_accurate(got, oracle(scaled), "float32")
    norms = np.linalg.norm(got.y / scaled.weights, axis=1)
    assert (np.diff(norms) > 0).all()


def test_duplicate_ids_each_have_their_own_gradient():
    inputs = make_inputs(16, 48, 32, 4, 4, ids=np.array([1, 1, 2, 1]))
    got, want = run_layer(inputs, mesh_of(2)), oracle(inputs)
    assert_accurate(got, want, "float32")
    assert rel_l2(got.dw[:, 0], got.dw[:, 1]) < 1e-6  # the same expert and token


def test_delays_on_a_rank_change_no_bit():
    mesh, rng = mesh_of(4), np.random.default_rng(0)
    inputs = jax.tree.map(jnp.asarray, make_inputs(64, 48, 32, 8, 2, dtype="bfloat16"))

    def delay(rank, x, late):
        if int(rank) == int(late):
            time.sleep(0.03)
        return np.asarray(x)

    def local(x, ids, weights, experts, late):
        x = jax.pure_callback(delay, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("expert"), x, late)
        return mok.local_moe(x, ids, weights, experts)

    specs = (P("expert"), P("expert"), P("expert"), mok.Experts(*[P("expert")] * 3), P())
    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("expert"), check_vma=False))
    want = mok.moe(*inputs[:4], mesh=mesh)
    for _ in range(20):
        assert_same_bits(f(*inputs[:4], jnp.int32(rng.integers(4))), want)
