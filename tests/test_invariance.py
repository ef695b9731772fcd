"""The headline: the same bits every time, for any size and placement of the EP group."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from layer_cases import assert_same_bits, layer_step, make_inputs, mesh_of, run_layer, with_master_weights

import jax_mok as mok


def routed(result):
    """What the contract covers. Gradients of the shared expert are summed over ranks by XLA."""
    return result._replace(shared=None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("E", "sizes"), [(720, [2, 3, 4, 5, 8, 16, 72]), (64, [2, 64])], ids=["720 experts", "64 experts"]
)
def test_any_ep_size_gives_the_bits_of_one_rank(E, sizes, dtype):
    inputs = make_inputs(E, 130, 72, E, 6, dtype=dtype, shared=40)
    want = routed(run_layer(inputs, mesh_of(1)))
    assert_same_bits(routed(run_layer(inputs, None)), want)
    for P in sizes:
        assert_same_bits(routed(run_layer(inputs, mesh_of(P))), want)


def test_an_uneven_batch_too():
    ids = np.random.default_rng(1).zipf(1.3, (160, 4)) % 40  # a few hot experts, most nearly empty
    inputs = make_inputs(160, 96, 64, 40, 4, dtype="bfloat16", ids=ids)
    want = run_layer(inputs, mesh_of(1))
    for P in (2, 5, 8, 40):
        assert_same_bits(run_layer(inputs, mesh_of(P)), want)


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_float32_weight_gradients_too(residuals):
    inputs, _ = with_master_weights(144, 130, 72, 72, 6, shared=40)
    want = routed(run_layer(inputs, mesh_of(1)))
    assert {g.dtype.name for g in want.experts} == {"float32"}
    for P in (1, 2, 3, 8, 72):
        step = layer_step(inputs, mesh_of(P), mok.MoEConfig(residuals=residuals))
        for _ in range(3):
            assert_same_bits(routed(step()), want)


@pytest.mark.parametrize("P", [1, 8])
def test_fifty_repeats(P):
    inputs = make_inputs(192, 96, 64, 16, 4, dtype="bfloat16", shared=48)
    step = layer_step(inputs, mesh_of(P))
    want = step()
    for _ in range(50):
        assert_same_bits(step(), want)


def test_saved_and_recomputed_residuals_give_the_same_gradients():
    inputs = make_inputs(160, 130, 200, 16, 4, dtype="bfloat16", shared=72)
    want = run_layer(inputs, mesh_of(4))
    assert_same_bits(run_layer(inputs, mesh_of(4), mok.MoEConfig(residuals="recompute")), want)


@pytest.mark.parametrize("capacity_factor", [4.0, 3.0])
def test_capacity_changes_no_bit(capacity_factor):
    inputs = make_inputs(160, 64, 48, 16, 4, dtype="bfloat16")
    want = run_layer(inputs, mesh_of(4))
    assert_same_bits(run_layer(inputs, mesh_of(4), mok.MoEConfig(capacity_factor=capacity_factor)), want)


def test_a_token_does_not_depend_on_the_rest_of_the_batch():
    inputs = make_inputs(128, 96, 64, 16, 4, dtype="bfloat16", shared=32)
    alone = inputs._replace(
        x=inputs.x[40:41], ids=inputs.ids[40:41], weights=inputs.weights[40:41], dy=inputs.dy[40:41]
    )
    whole, one = run_layer(inputs, mesh_of(4)), run_layer(alone, None)
    for name in ("y", "dx", "dw"):
        assert_same_bits(getattr(one, name), getattr(whole, name)[40:41])


MESHES = {
    "expert first": ((4, 2, 2), ("expert", "data", "model")),
    "expert in the middle": ((2, 4, 2), ("data", "expert", "model")),
    "expert last": ((2, 2, 4), ("model", "data", "expert")),
    "data 2, expert 2, model 2": ((2, 2, 2), ("data", "expert", "model")),
}


@pytest.mark.parametrize("name", MESHES)
def test_place_of_the_ep_axis_in_the_mesh(name):
    sizes, names = MESHES[name]
    inputs = make_inputs(96, 96, 64, 8, 3, dtype="bfloat16", shared=48)
    want = routed(run_layer(inputs, mesh_of(1)))
    split = mesh_of(*(1 if n == "expert" else s for s, n in zip(sizes, names, strict=True)), names=names)
    same_shards = routed(run_layer(inputs, split))
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(*sizes, names=names, axis_type=axis_type)
        # tokens over the EP axis alone: every other axis repeats the same work, and all bits are those of one rank
        assert_same_bits(routed(run_layer(inputs, mesh, token_axes=("expert",))), want)
        # tokens over data too: XLA adds up the weight gradients of the data shards, so the bits of these are those of
        # any EP size with the same data shards
        got = routed(run_layer(inputs, mesh))
        for field in ("y", "dx", "dw"):
            assert_same_bits(getattr(got, field), getattr(want, field))
        assert_same_bits(got, same_shards)


@pytest.mark.parametrize("order", ["reversed", "shuffled", "subgroups of every other device"])
def test_order_of_devices(order):
    devices = list(jax.devices()[:8])
    if order == "reversed":
        devices.reverse()
    elif order == "shuffled":
        np.random.default_rng(0).shuffle(devices)
    else:
        devices = devices[::2] + devices[1::2]
    inputs = make_inputs(96, 96, 64, 8, 3, dtype="bfloat16")
    want = run_layer(inputs, mesh_of(1))
    assert_same_bits(run_layer(inputs, mesh_of(8, devices=devices)), want)
    grouped = mesh_of(2, 4, names=("data", "expert"), devices=devices)
    assert_same_bits(run_layer(inputs, grouped, token_axes=("expert",)), want)
