"""jax_mok.flax.MoE against float64 numpy, on one device and on meshes, in NNX and in Linen."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from block_reference import moe_block, relative_l2
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.flax import MoE, SelectionBias

pytestmark = pytest.mark.usefixtures("quickly_compiled", "no_implicit_promotion")
B, S, H, I, E, K = 8, 16, 64, 48, 8, 2
SOFTMAX = {"dtype": jnp.float32}
SIGMOID = {"router": "sigmoid", "scale": 2.5, "shared_intermediate": 32, "dtype": jnp.float32}


def make_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "expert"), axis_types=(kind,) * 2)


def make_block(**options) -> MoE:
    block = MoE(H, I, E, K, rngs=nnx.Rngs(0), **options)
    if block.selection_bias is not None:
        skew = jnp.linspace(-0.1, 0.1, E, dtype=jnp.float32)
        block.selection_bias[...] = jax.device_put(skew, block.selection_bias[...].sharding)
    return block


def make_x(seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, S, H)), jnp.float32)


def by_name(state) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}


def reference(block: MoE, x, weights=None):
    s = block.settings
    weights = by_name(nnx.state(block)) if weights is None else weights
    return moe_block(weights, x, s.top_k, s.router, s.normalize, s.scale)


def loss_of(block: MoE, x, cotangent):
    y, aux = block(x)
    return (y * cotangent).sum() + aux.load_balancing_loss + aux.router_z_loss


@pytest.mark.parametrize("options", [SOFTMAX, dict(SOFTMAX, normalize=False), SIGMOID], ids=["top2", "raw", "sigmoid"])
def test_output_and_aux_match_numpy(options):
    block, x = make_block(**options), make_x()
    y, aux = nnx.jit(MoE.__call__)(block, x)
    want, want_aux = reference(block, x)
    assert y.dtype == jnp.float32
    assert relative_l2(y, want) < 1e-5
    assert float(aux.load_balancing_loss) == pytest.approx(want_aux["load_balancing_loss"], rel=1e-5)
    assert float(aux.router_z_loss) == pytest.approx(want_aux["router_z_loss"], rel=1e-5)
    np.testing.assert_array_equal(aux.expert_load, want_aux["expert_load"])


@pytest.mark.parametrize("options", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_gradients_match_differences_of_numpy(options):
    block, x = make_block(**options), make_x()
    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=x.shape).astype(np.float32) / np.sqrt(x.size)
    grads, dx = nnx.jit(nnx.grad(loss_of, argnums=(0, 1)))(block, x, cotangent)
    grads = by_name(grads)
    base = {name: a.astype(np.float64) for name, a in by_name(nnx.state(block)).items()}
    assert grads.keys() == base.keys() - {"selection_bias"}

    def loss(weights, x):
        y, aux = reference(block, x, weights)
        return (y * cotangent).sum() + aux["load_balancing_loss"] + aux["router_z_loss"]

    for name, grad in {**grads, "x": dx}.items():
        # along the gradient itself, so that the difference is as large as it can be
        v = np.asarray(grad, np.float64) / np.linalg.norm(grad)
        values = []
        for eps in (1e-5, -1e-5):
            moved = {**base, name: base[name] + eps * v} if name in base else base
            values.append(loss(moved, np.asarray(x, np.float64) + (eps * v if name == "x" else 0)))
        want = (values[0] - values[1]) / 2e-5
        assert np.linalg.norm(grad) == pytest.approx(want, rel=2e-4), name


def test_computes_in_bfloat16_and_keeps_gradients_in_the_parameters_dtype():
    block, x = make_block(shared_intermediate=32), make_x()
    (_, y), grads = nnx.jit(
        nnx.value_and_grad(lambda block, x: ((y := block(x)[0]).astype(jnp.float32).sum(), y), has_aux=True)
    )(block, x)
    assert y.dtype == jnp.bfloat16
    # the reference computes on the rounded weights, but routes on what the router sees
    weights = {n: a if n == "router" else a.astype(jnp.bfloat16) for n, a in by_name(nnx.state(block)).items()}
    assert relative_l2(y, reference(block, x, weights)[0]) < 1e-2
    assert {a.dtype for a in by_name(grads).values()} == {jnp.dtype(jnp.float32)}
    assert all((a != a.astype(jnp.bfloat16)).any() for a in by_name(grads).values())  # not rounded on the way
    low = make_block(param_dtype=jnp.bfloat16)
    grads = nnx.eval_shape(lambda block: nnx.grad(lambda b: b(x)[0].astype(jnp.float32).sum())(block), low)
    assert {v.dtype for v in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("kind", "ambient"), [(AxisType.Auto, False), (AxisType.Explicit, True)], ids=["Auto-mesh=", "Explicit-ambient"]
)
def test_a_training_step_on_a_mesh_is_that_of_one_device(kind, ambient):
    def train(block, x):
        optimizer = nnx.Optimizer(block, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def step(block, optimizer, x):
            def loss(block):
                y, aux = block(x)
                return ((y - 1) ** 2).mean() + 0.01 * aux.load_balancing_loss, aux

            (value, aux), grads = nnx.value_and_grad(loss, has_aux=True)(block)
            optimizer.update(block, grads)
            block.update_bias(aux.expert_load)
            return value

        return float(step(block, optimizer, x)), optimizer

    x, mesh = make_x(), make_mesh(kind)
    one = make_block(**SIGMOID)
    start = by_name(nnx.state(one))
    want, _ = train(one, x)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        block = make_block(mesh=None if ambient else mesh, **SIGMOID)
        got, optimizer = train(block, jax.device_put(x, NamedSharding(mesh, P(("data", "expert")))))

    assert got == pytest.approx(want, rel=1e-5)
    after, want_after = by_name(nnx.state(block)), by_name(nnx.state(one))
    for name, value in after.items():
        assert relative_l2(value - start[name], want_after[name] - start[name]) < 1e-3, name
    moments = [v[...] for _, v in nnx.to_flat_state(nnx.state(optimizer)) if v[...].shape == (E, H, I)]
    assert len(moments) == 2
    for a in (block.experts.gate[...], block.experts.up[...], *moments):
        assert a.sharding.shard_shape(a.shape) == (E // 4, H, I)
    assert block.router[...].sharding.is_fully_replicated


def test_sharding_metadata_needs_no_mesh():
    specs = nnx.get_partition_spec(nnx.state(make_block(**SIGMOID)))
    specs = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(specs)}
    by_expert = {f"experts.{m}": P("expert", None, None) for m in ("gate", "up", "down")}
    replicated = {f"shared.{m}": P(None, None) for m in ("gate", "up", "down")}
    assert specs == {**by_expert, **replicated, "router": P(None, None), "selection_bias": P(None)}


def test_a_stack_of_blocks_made_by_vmap_runs_in_a_scan():
    layers = 3

    @nnx.vmap(in_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def stack(key):
        return MoE(H, I, E, K, dtype=jnp.float32, rngs=nnx.Rngs(key))

    blocks = stack(jax.random.split(jax.random.key(0), layers))
    assert nnx.get_partition_spec(nnx.state(blocks))["experts"]["gate"].get_value() == P(None, "expert", None, None)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), transform_metadata={nnx.PARTITION_NAME: None})
    def run(x, block):
        y, aux = block(x)
        return x + y, aux.load_balancing_loss

    x = make_x()
    y, losses = run(x, blocks)
    assert losses.shape == (layers,)
    weights = by_name(nnx.state(blocks))
    want = np.asarray(x, np.float64)
    for layer in range(layers):
        want = want + moe_block({n: a[layer] for n, a in weights.items()}, want, K)[0]
    assert relative_l2(y, want) < 1e-5


def test_experts_that_the_axis_does_not_divide_are_refused():
    mesh = make_mesh()
    with pytest.raises(ValueError, match="6 experts cannot be spread evenly over the 4 devices"):
        MoE(H, I, 6, K, mesh=mesh, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="6 experts cannot be spread evenly over the 4 devices"):
        MoE(H, I, 6, K, rngs=nnx.Rngs(0))
    block = MoE(H, I, 6, K, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="6 experts cannot be spread evenly over the 4 devices"):
        block(make_x())


def test_misfits_are_refused_at_construction_with_their_numbers():
    def build(hidden=H, intermediate=I, num_experts=E, top_k=K, **options):
        return MoE(hidden, intermediate, num_experts, top_k, rngs=nnx.Rngs(0), **options)

    for options, message in (
        ({"top_k": 9}, "9 experts per token .* with 8"),
        ({"hidden": 0}, "hidden is 0"),
        ({"shared_intermediate": 0}, "shared_intermediate is 0"),
        ({"router": "hash"}, "router is 'hash'; it must be one of 'softmax', 'sigmoid'"),
        ({"scale": 2.5}, "scale = 2.5.*router='sigmoid'"),
        ({"router": "sigmoid", "num_groups": 3}, "8 experts do not form 3 groups"),
        ({"mesh": make_mesh(), "axis": "model"}, "no axis 'model'"),
        ({"mesh": make_mesh(), "token_axes": ("data",)}, "must contain the EP axis 'expert'"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**options)
    with pytest.raises(ValueError, match=r"H = hidden = 64, got \[3, 5\]"):
        build()(jnp.zeros((3, 5)))
    with pytest.raises(ValueError, match="no selection bias"):
        build().update_bias(jnp.zeros(E, jnp.int32))


def test_the_selection_bias_is_state_and_not_a_parameter():
    block = make_block(**SIGMOID)
    assert [type(v) for _, v in nnx.to_flat_state(nnx.state(block, nnx.Not(nnx.Param)))] == [SelectionBias]
    before = np.asarray(block.selection_bias[...])
    load = np.array([0, 5, 9, 5, 5, 5, 5, 6], np.int32)
    nnx.jit(lambda block, load: block.update_bias(load, rate=0.01))(block, load)
    assert relative_l2(block.selection_bias[...], before + 0.01 * np.sign(5 - load)) < 1e-6


def test_the_graph_is_stable():
    block, x, traces = make_block(**SIGMOID), make_x(), []

    @nnx.jit
    def f(block, x):
        traces.append(1)
        y, aux = block(x)
        block.update_bias(aux.expert_load)
        return y

    f(block, x)
    f(block, x)
    f(make_block(**SIGMOID), x)
    assert len(traces) == 1
    graphdef, state = nnx.split(block)
    assert hash(graphdef) == hash(nnx.graphdef(make_block(**SIGMOID)))
    again = nnx.merge(*pickle.loads(pickle.dumps((graphdef, state))))
    np.testing.assert_array_equal(f(again, x), f(block, x))
    assert len(traces) == 1


def test_linen_through_the_bridge():
    block, x = make_block(**SIGMOID), make_x()
    layer = nnx.bridge.to_linen(MoE, H, I, E, K, **SIGMOID)
    boxed = jax.jit(layer.init)(jax.random.key(3), x)
    specs = linen.get_partition_spec(boxed)
    assert specs["params"]["experts"]["down"] == P("expert", None, None)
    assert specs["params"]["router"] == P(None, None)

    own = by_name(nnx.state(block))
    variables = linen.unbox(boxed)
    assert jax.tree.map(jnp.shape, variables["params"]["experts"]) == {
        "gate": (E, H, I),
        "up": (E, H, I),
        "down": (E, I, H),
    }
    variables = {
        "params": {
            "router": own["router"],
            **{part: {m: own[f"{part}.{m}"] for m in ("gate", "up", "down")} for part in ("experts", "shared")},
        },
        "moe_selection_bias": {"selection_bias": own["selection_bias"]},
    }

    def loss(params, x):
        y, aux = layer.apply({**variables, "params": params}, x)
        return (y**2).sum() + aux.load_balancing_loss, (y, aux)

    (_, (y, aux)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"], x)
    want, want_aux = reference(block, x)
    assert relative_l2(y, want) < 1e-5
    np.testing.assert_array_equal(aux.expert_load, want_aux["expert_load"])
    want_grads = nnx.jit(nnx.grad(lambda b, x: (b(x)[0] ** 2).sum() + b(x)[1].load_balancing_loss))(block, x)
    assert relative_l2(grads["experts"]["up"], want_grads["experts"]["up"][...]) < 1e-5
    assert relative_l2(grads["router"], want_grads["router"][...]) < 1e-5

    _, moved = layer.apply(variables, aux.expert_load, nnx_method="update_bias", mutable=["moe_selection_bias"])
    block.update_bias(aux.expert_load)
    moved = linen.unbox(moved)["moe_selection_bias"]["selection_bias"]
    assert relative_l2(moved, block.selection_bias[...]) < 1e-6


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_linen_on_a_mesh(kind):
    x, mesh = make_x(), make_mesh(kind)
    layer = nnx.bridge.to_linen(MoE, H, I, E, K, **SOFTMAX)
    with jax.set_mesh(mesh):
        variables = jax.jit(layer.init)(jax.random.key(3), x)
        gate = variables["params"]["experts"]["gate"].value
        assert gate.sharding.shard_shape(gate.shape) == (E // 4, H, I)
        y, _ = jax.jit(layer.apply)(variables, jax.device_put(x, NamedSharding(mesh, P(("data", "expert")))))
    params = jax.device_get(linen.unbox(variables))["params"]
    weights = {"router": params["router"], **{f"experts.{m}": a for m, a in params["experts"].items()}}
    assert relative_l2(y, moe_block(weights, x, K)[0]) < 1e-5


def test_importing_jax_mok_imports_neither_flax_nor_equinox():
    code = "import sys, jax_mok, jax_mok.router; assert not {'flax', 'equinox'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
