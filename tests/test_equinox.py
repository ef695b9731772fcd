"""jax_mok.equinox.MoE against float64 numpy, on one device and on meshes."""

from __future__ import annotations

import contextlib
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from block_reference import moe_block, relative_l2
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok import RESIDUAL_NAMES, Experts
from jax_mok.equinox import MoE, partition_specs, shard, shardings, trainable

pytestmark = pytest.mark.usefixtures("quickly_compiled", "no_implicit_promotion")
B, S, H, I, E, K = 8, 16, 64, 48, 8, 2
SIGMOID = {"router": "sigmoid", "scale": 2.5, "shared_intermediate": 32, "dtype": jnp.float32}


class Model(eqx.Module):
    inp: eqx.nn.Linear
    block: MoE

    def __init__(self, key: jax.Array, **options):
        inp, block = jax.random.split(key)
        self.inp = eqx.nn.Linear(H, H, key=inp)
        self.block = MoE(H, I, E, K, key=block, **options)

    def __call__(self, x, mesh=None):
        return self.block(x + x @ self.inp.weight.T + self.inp.bias[None, None], mesh=mesh)


def make_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "expert"), axis_types=(kind,) * 2)


def skewed(block: MoE) -> MoE:
    return eqx.tree_at(lambda b: b.selection_bias, block, jnp.linspace(-0.1, 0.1, E, dtype=jnp.float32))


def make_block(**options) -> MoE:
    block = MoE(H, I, E, K, key=jax.random.key(0), **options)
    return block if block.selection_bias is None else skewed(block)


def make_x(seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, S, H)), jnp.float32)


def named(block: MoE) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(eqx.filter(block, eqx.is_array))
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(a) for path, a in leaves}


def reference(block: MoE, x):
    s = block.settings
    return moe_block(named(block), x, s.top_k, s.router, s.normalize, s.scale)


@pytest.mark.parametrize("options", [{"dtype": jnp.float32}, SIGMOID], ids=["softmax", "sigmoid"])
def test_output_and_aux_match_numpy(options):
    block, x = make_block(**options), make_x()
    y, aux = eqx.filter_jit(block)(x)
    want, want_aux = reference(block, x)
    assert y.dtype == jnp.float32
    assert relative_l2(y, want) < 1e-5
    assert float(aux.load_balancing_loss) == pytest.approx(want_aux["load_balancing_loss"], rel=1e-5)
    assert float(aux.router_z_loss) == pytest.approx(want_aux["router_z_loss"], rel=1e-5)
    np.testing.assert_array_equal(aux.expert_load, want_aux["expert_load"])


def test_gradients_match_differences_of_numpy():
    block, x = make_block(**SIGMOID), make_x()
    cotangent = np.random.default_rng(2).normal(size=x.shape).astype(np.float32) / np.sqrt(x.size)

    @eqx.filter_jit
    @eqx.filter_grad
    def grad_of(block):
        y, aux = block(x)
        return (y * cotangent).sum() + aux.load_balancing_loss

    grads, base = named(grad_of(block)), named(block)
    np.testing.assert_array_equal(grads.pop("selection_bias"), np.zeros(E))

    def loss(weights):
        y, aux = moe_block(weights, x, K, "sigmoid", True, 2.5)
        return (y * cotangent).sum() + aux["load_balancing_loss"]

    assert grads.keys() == base.keys() - {"selection_bias"}
    for name, grad in grads.items():
        v = grad.astype(np.float64) / np.linalg.norm(grad)
        plus, minus = (loss({**base, name: base[name] + eps * v}) for eps in (1e-5, -1e-5))
        assert np.linalg.norm(grad) == pytest.approx((plus - minus) / 2e-5, rel=2e-4), name


def test_computes_in_bfloat16_and_keeps_gradients_in_the_parameters_dtype():
    x = make_x()
    for param_dtype in (jnp.float32, jnp.bfloat16):
        block = make_block(param_dtype=param_dtype)
        assert eqx.filter_eval_shape(block, x)[0].dtype == jnp.bfloat16
        grads = eqx.filter_jit(eqx.filter_grad(lambda b: b(x)[0].astype(jnp.float32).sum()))(block)
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(param_dtype)}
        if param_dtype == jnp.float32:  # not rounded on the way
            assert all((g != g.astype(jnp.bfloat16).astype(g.dtype)).any() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("kind", "ambient"), [(AxisType.Explicit, False), (AxisType.Auto, True)], ids=["Explicit-mesh=", "Auto-ambient"]
)
def test_a_training_step_on_a_mesh_is_that_of_one_device(kind, ambient):
    optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))

    @eqx.filter_jit
    def step(model, state, x, mesh):
        params, rest = eqx.partition(model, trainable(model))

        @eqx.filter_value_and_grad(has_aux=True)
        def loss(params):
            y, aux = eqx.combine(params, rest)(x, mesh)
            return ((y - 1) ** 2).mean() + 0.01 * aux.load_balancing_loss, aux

        (value, aux), grads = loss(params)
        updates, state = optimizer.update(grads, state, params)
        model = eqx.combine(eqx.apply_updates(params, updates), rest)
        model = eqx.tree_at(lambda m: m.block, model, model.block.update_bias(aux.expert_load))
        return value, model, state, aux

    def start(model):
        return optimizer.init(eqx.filter(model, trainable(model)))

    x, mesh = make_x(), make_mesh(kind)
    model = Model(jax.random.key(0), **SIGMOID)
    model = eqx.tree_at(lambda m: m.block, model, skewed(model.block))
    want, one, _, _ = step(model, start(model), x, None)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        placed = shard(model, mesh)
        x = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))
        got, after, state, aux = step(placed, start(placed), x, None if ambient else mesh)

    assert float(got) == pytest.approx(float(want), rel=1e-5)
    for (path, a), b, c in zip(
        jax.tree.leaves_with_path(eqx.filter(after, eqx.is_array)),
        jax.tree.leaves(eqx.filter(one, eqx.is_array)),
        jax.tree.leaves(eqx.filter(model, eqx.is_array)),
        strict=True,
    ):
        assert relative_l2(a - np.asarray(c), b - c) < 1e-3, path
    load = np.asarray(aux.expert_load)
    moved = np.asarray(model.block.selection_bias) + 1e-3 * np.sign(load.mean() - load)
    assert relative_l2(after.block.selection_bias, moved) < 1e-6, "weight decay must not reach it"
    moments = [m for m in jax.tree.leaves(state) if eqx.is_array(m) and m.shape == (E, H, I)]
    assert len(moments) == 2
    for a in (after.block.experts.gate, after.block.experts.up, *moments):
        assert a.sharding.shard_shape(a.shape) == (E // 4, H, I)
    assert after.block.router.sharding.is_fully_replicated


def test_partition_specs_cover_every_array_of_a_model_and_nothing_else():
    model = eqx.filter_eval_shape(Model, jax.random.key(0), **SIGMOID)
    specs = partition_specs(model)
    block = specs.block
    assert block.experts == Experts(*[P("expert", None, None)] * 3)
    assert block.shared == Experts(*[P(None, None)] * 3)
    assert (block.router, block.selection_bias) == (P(None, None), P(None))
    assert specs.inp.weight == P()
    arrays = eqx.filter(model, lambda leaf: hasattr(leaf, "shape"))
    assert jax.tree.structure(specs) == jax.tree.structure(arrays)
    assert partition_specs(make_block(axis=None)).experts.gate == P(None, None, None)
    on_mesh = shardings(model, make_mesh())
    assert on_mesh.block.experts.up == NamedSharding(make_mesh(), P("expert", None, None))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_model_built_under_jit_is_sharded_from_the_start(kind):
    mesh = make_mesh(kind)
    block = eqx.filter_jit(lambda key: shard(MoE(H, I, E, K, key=key), mesh))(jax.random.key(0))
    for a in block.experts:
        assert a.sharding.shard_shape(a.shape) == (E // 4, *a.shape[1:])
    assert block.router.sharding.is_fully_replicated
    assert relative_l2(block.experts.down, make_block().experts.down) < 1e-6


def test_trainable_is_every_float_array_but_the_selection_bias():
    model = Model(jax.random.key(0), **SIGMOID)
    params, rest = eqx.partition(model, trainable(model))
    assert params.block.selection_bias is None
    assert [a.shape for a in jax.tree.leaves(eqx.filter(rest, eqx.is_array))] == [(E,)]
    softmax = make_block()
    assert all(jax.tree.leaves(trainable(softmax)))


def test_the_tree_is_stable_and_its_static_part_is_plain():
    block, x, traces = make_block(**SIGMOID), make_x(), []

    @jax.jit
    def f(block, x):
        traces.append(1)
        y, aux = block(x)
        return y, block.update_bias(aux.expert_load)

    y, moved = f(block, x)
    f(moved, x)
    f(make_block(**{**SIGMOID, "dtype": "float32"}), x)
    again = pickle.loads(pickle.dumps(block))
    y_again, _ = f(again, x)
    np.testing.assert_array_equal(y, y_again)
    assert len(traces) == 1
    treedef = jax.tree.structure(block)
    assert treedef == jax.tree.structure(again) == jax.tree.structure(moved)
    assert hash(treedef) == hash(jax.tree.structure(again))
    assert all(eqx.is_array(leaf) for leaf in jax.tree.leaves(block))
    assert jax.tree.leaves(block.settings) == [block.settings]


def test_the_losses_do_not_bring_the_forward_call_back_under_checkpoint():
    pytest.importorskip("jax_mok._native")
    policy = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)

    def loss(block, x, policy):
        y, aux = jax.checkpoint(lambda block, x: block(x), policy=policy)(block, x)
        return (y**2).sum() + aux.load_balancing_loss + aux.router_z_loss

    def forward_calls(policy):
        lowered = jax.jit(jax.grad(loss), static_argnums=2).lower(make_block(**SIGMOID), make_x(), policy)
        return lowered.as_text().count("@jax_mok_forward")

    assert forward_calls(policy) == 1
    assert forward_calls(None) == 2


def test_experts_that_the_axis_does_not_divide_are_refused():
    mesh = make_mesh()
    message = "6 experts cannot be spread evenly over the 4 devices"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        MoE(H, I, 6, K, key=jax.random.key(0))
    block = MoE(H, I, 6, K, key=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        block(make_x(), mesh=mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        block(make_x())


def test_misfits_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match=r"9 experts per token .* with 8"):
        MoE(H, I, E, 9, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"H = hidden = 64, got \[3, 5\]"):
        make_block()(jnp.zeros((3, 5)))
    with pytest.raises(ValueError, match="no selection bias"):
        make_block().update_bias(jnp.zeros(E, jnp.int32))
