"""What XLA is given and what it makes of it: one foreign call each way and nothing around them."""

import jax
import jax.numpy as jnp
import pytest
from layer_cases import make_inputs, mesh_of, with_master_weights

import jax_mok as mok


def programs(mesh, shared=0, config=mok.MoEConfig(), inputs=None, **kwargs):  # noqa: B008
    """(layer, its value_and_grad), lowered with inputs that already have the layer's shardings."""
    inputs = inputs or make_inputs(64, 48, 32, 8, 2, dtype="bfloat16", shared=shared)
    x, ids, weights, experts, shared_w, _ = jax.tree.map(jnp.asarray, inputs)
    axes = kwargs.get("token_axes") or tuple(a for a in ("data", "expert") if a in mesh.axis_names)
    by_token = jax.NamedSharding(mesh, jax.P(axes))
    by_expert = jax.NamedSharding(mesh, jax.P("expert"))
    x, ids, weights = jax.device_put((x, ids, weights), by_token)
    experts = jax.device_put(experts, by_expert)
    shared_w = jax.device_put(shared_w, jax.NamedSharding(mesh, jax.P()))

    def layer(x, ids, weights, experts, shared_w):
        return mok.moe(x, ids, weights, experts, shared=shared_w, mesh=mesh, config=config, **kwargs)

    def loss(*args):
        return layer(*args).astype(jnp.float32).sum()

    args = (x, ids, weights, experts, shared_w)
    return jax.jit(layer).lower(*args), jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3, 4))).lower(*args)


def targets(report):
    return [c.target for c in report.calls]


@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("shared", [0, 24])
@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 2), (2, 2, 2)])
def test_one_call_each_way_and_no_exchange_outside_them(sizes, shared, residuals):
    mesh = mesh_of(*sizes, names=("expert", "data", "model")[: len(sizes)])
    forward, step = programs(mesh, shared, mok.MoEConfig(residuals=residuals))
    expected = ((forward, ["jax_mok_forward"]), (step, ["jax_mok_forward", "jax_mok_backward"]))
    for program, want in expected:
        assert targets(mok.inspect(program)) == want
        compiled = program.compile()
        report = mok.inspect(compiled)
        assert targets(report) == want
        # replicated weights (shared expert; experts over "data") and the loss are summed: that is the caller's model
        assert set(report.collectives) <= {"all-reduce"}, compiled.as_text()
        assert "callback" not in compiled.as_text()
    if sizes == (4,) and not shared:
        assert mok.inspect(forward.compile()).collectives == {}


@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("shared", [0, 24])
def test_no_array_without_elements_goes_into_or_out_of_a_shard_map(shared, residuals):
    """XLA for GPUs crashes on them."""
    x, ids, weights, experts, shared_w, dy = jax.tree.map(
        jnp.asarray, make_inputs(64, 48, 32, 8, 2, dtype="bfloat16", shared=shared)
    )

    def gradients(x, weights, experts, shared_w):
        config, mesh = mok.MoEConfig(residuals=residuals), mesh_of(4)
        layer = lambda x, w, e, s: mok.moe(x, ids, w, e, shared=s, mesh=mesh, config=config)  # noqa: E731
        return jax.vjp(layer, x, weights, experts, shared_w)[1](dy)

    equations = jax.make_jaxpr(gradients)(x, weights, experts, shared_w).eqns
    crossing = [v.aval for e in equations if e.primitive.name == "shard_map" for v in (*e.invars, *e.outvars)]
    assert len(crossing) > 20
    assert all(aval.size > 0 for aval in crossing), crossing


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_master_weights_cost_one_cast_and_no_other_pass(residuals):
    inputs, _ = with_master_weights(64, 48, 32, 8, 2, shared=24)
    forward, step = programs(mesh_of(4), config=mok.MoEConfig(residuals=residuals), inputs=inputs)
    for program in (forward, step):
        for weight, copies in (("2x48x32", 2), ("2x32x48", 1), ("48x24", 2), ("24x48", 1)):
            casts = [line for line in program.as_text().splitlines() if "convert" in line and f"<{weight}x" in line]
            assert len(casts) == copies
            assert all(f"(tensor<{weight}xf32>) -> tensor<{weight}xbf16>" in line for line in casts)
    forward_call, backward_call = mok.inspect(step.compile()).calls
    assert (forward_call.dtype, forward_call.weight_grads) == ("bfloat16", None)
    assert (backward_call.dtype, backward_call.weight_grads) == ("bfloat16", "float32")
    assert "weight gradients float32" in str(backward_call)


def test_attributes_are_readable():
    forward, _ = programs(mesh_of(4))
    text = forward.as_text()
    for words in ('axis = "expert"', "experts = 8", "ranks = 4", 'residuals = "save"', "timeout_s = 6.000000e+01"):
        assert words in text


def test_inspect_tells_shapes_flops_bytes():
    forward, step = programs(mesh_of(4), shared=24)
    for program in (forward, forward.compile(), forward.as_text(), forward.compile().as_text()):
        (call,) = mok.inspect(program).calls
        assert (call.tokens, call.hidden, call.inter, call.shared_inter) == (16, 48, 32, 24)
        assert (call.experts, call.top_k, call.ranks, call.axis, call.dtype) == (8, 2, 4, "expert", "bfloat16")
        assert call.flops == 6 * 48 * (16 * 2 * 32 + 16 * 24)
        assert call.link_bytes == 16 * 2 * 3 // 4 * 2 * 48 * 2
        assert call.residual_bytes == 0
        assert call.arena_bytes > 2 * 16 * 48 * 2
    first, second = mok.inspect(step.compile()).calls
    assert second.flops == 2 * first.flops
    assert first.residual_bytes > 16 * 2 * (48 + 2 * 32) * 2
    assert "jax_mok_backward" in str(mok.inspect(step.compile()))


@pytest.mark.parametrize("compiled", [False, True])
def test_inspect_knows_a_program_for_gpus_by_its_work_space(compiled):
    from jax_mok import runtime

    _, step = programs(mesh_of(4))
    text = (step.compile() if compiled else step).as_text()
    for_gpus = text.replace("u8[0]", "u8[4096]").replace("0xui8", "4096xui8")
    on_cpu, on_gpu = (mok.inspect(t).calls for t in (text, for_gpus))
    assert [c.workspace_bytes for c in on_cpu] == [0, 0]
    assert [c.workspace_bytes for c in on_gpu] == [4096, 4096]
    shape = (4, 8, 2, 2, 16, 48, 32, 0, 128)
    assert on_gpu[0].arena_bytes == runtime.native().cuda_arena_bytes(shape) != on_cpu[0].arena_bytes
    assert on_gpu[0].residual_bytes == runtime.native().cuda_padded_rows(shape) * (48 + 2 * 32) * 2
    assert "work space 4,096 B" in str(on_gpu[0])


def test_inspect_of_a_program_without_the_layer():
    report = mok.inspect(jax.jit(lambda x: x + 1).lower(1.0))
    assert report.calls == ()
    assert "no jax_mok calls" in str(report)
    with pytest.raises(TypeError, match="lower"):
        mok.inspect(3)


def test_the_arena_is_as_large_as_inspect_says():
    from jax_mok import runtime

    forward, _ = programs(mesh_of(4))
    (call,) = mok.inspect(forward).calls
    runtime.release()
    assert runtime.held_bytes() == 0
    inputs = make_inputs(64, 48, 32, 8, 2, dtype="bfloat16")
    x, ids, weights, experts, _, _ = jax.tree.map(jnp.asarray, inputs)
    jax.block_until_ready(mok.moe(x, ids, weights, experts, mesh=mesh_of(4)))
    pages = 3 * 4096  # arena, flags and scratch are rounded to pages
    arena_and_scratch = runtime.held_bytes() // 4
    assert call.arena_bytes <= arena_and_scratch <= call.arena_bytes + pages + 2 * 96 * 8 * (48 + 32) * 2
