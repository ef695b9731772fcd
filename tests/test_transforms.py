"""The layer under JAX's transformations and caches."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_cases import (
    assert_accurate,
    assert_same_bits,
    make_inputs,
    mesh_of,
    oracle,
    rel_l2,
    run_layer,
    with_master_weights,
)

import jax_mok as mok


def to_jax(inputs):
    return jax.tree.map(jnp.asarray, inputs)


def targets(program):
    return sorted(c.target for c in mok.inspect(program).calls)


CHECKPOINTS = {
    "nothing saveable": (jax.checkpoint_policies.nothing_saveable, 2),
    "save by name": (jax.checkpoint_policies.save_only_these_names(*mok.RESIDUAL_NAMES), 1),
}


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
@pytest.mark.parametrize("prevent_cse", [True, False])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name, prevent_cse, weights):
    policy, forward_calls = CHECKPOINTS[name]
    wide, low = with_master_weights(64, 48, 32, 8, 2, shared=16)
    b, mesh = to_jax(wide if weights == "float32" else low), mesh_of(4)

    def loss(wrap):
        def block(x, weights, experts, shared):
            return jnp.tanh(mok.moe(jnp.sin(x), b.ids, weights, experts, shared=shared, mesh=mesh))

        return jax.jit(
            jax.value_and_grad(lambda *a: (wrap(block)(*a).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2, 3))
        )

    args = (b.x, b.weights, b.experts, b.shared)
    plain = loss(lambda f: f)
    saved = loss(lambda f: jax.checkpoint(f, policy=policy, prevent_cse=prevent_cse))
    assert targets(plain.lower(*args)) == ["jax_mok_backward", "jax_mok_forward"]
    lowered = saved.lower(*args)
    if forward_calls == 1 or prevent_cse:  # without prevent_cse XLA may merge the two forward calls again
        assert targets(lowered) == ["jax_mok_backward"] + ["jax_mok_forward"] * forward_calls
    (l0, g0), (l1, g1) = plain(*args), saved(*args)
    assert rel_l2(l1, l0) <= 1e-5
    for a, c in zip(jax.tree.leaves(g1), jax.tree.leaves(g0), strict=True):
        assert rel_l2(a, c) <= 1e-3


@pytest.mark.usefixtures("quickly_compiled")
def test_scan_over_48_layers():
    layers, mesh = 48, mesh_of(4)
    b = to_jax(make_inputs(32, 48, 32, 8, 2))
    rng = np.random.default_rng(0)
    scale = jnp.asarray(rng.uniform(0.9, 1.1, (layers, 1, 1, 1)), jnp.float32)
    stack = jax.tree.map(lambda w: w * scale, b.experts)

    def layer(x, experts):
        normed = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x + mok.moe(normed, b.ids, b.weights, experts, mesh=mesh), None

    def scanned(body):
        return lambda x, stack: jax.lax.scan(body, x, stack)[0].sum()

    def unrolled(x, stack):
        for i in range(layers):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], stack))
        return x.sum()

    want = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(b.x, stack)
    for body in (layer, jax.checkpoint(layer)):
        got = jax.jit(jax.grad(scanned(body), argnums=(0, 1)))(b.x, stack)
        for a, c in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.isfinite(np.asarray(a, np.float32)).all()
            assert rel_l2(a, c) <= 1e-3


def test_while_loop_and_nested_scan():
    b, mesh = to_jax(make_inputs(32, 48, 32, 8, 2)), mesh_of(4)

    def once(x):
        return mok.moe(x, b.ids, b.weights, b.experts, mesh=mesh)

    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, once(c[1])), (0, x))[1]

    def nested(x):
        inner = jax.checkpoint(lambda c, _: (once(c), None))
        outer = lambda c, _: (jax.lax.scan(inner, c, None, length=1)[0], None)  # noqa: E731
        return jax.lax.scan(outer, x, None, length=3)[0]

    want = once(once(once(b.x)))
    assert_same_bits(jax.jit(loop)(b.x), want)
    assert_same_bits(jax.jit(nested)(b.x), want)
    assert np.isfinite(np.asarray(jax.jit(jax.grad(lambda x: nested(x).sum()))(b.x))).all()


def test_order_of_forward_and_backward_calls():
    """Forward A, forward B, backward B, backward A, and backward A twice: no call leaves anything behind."""
    mesh = mesh_of(4)
    a, b = (to_jax(make_inputs(64, 48, 32, 8, 2, dtype="bfloat16", seed=s)) for s in (1, 2))

    def pull(b):
        return jax.vjp(lambda x, e: mok.moe(x, b.ids, b.weights, e, mesh=mesh), b.x, b.experts)

    ya, pull_a = pull(a)
    yb, pull_b = pull(b)
    gb, ga, again = pull_b(b.dy), pull_a(a.dy), pull_a(a.dy)
    for inputs, y, (dx, experts) in ((a, ya, ga), (b, yb, gb), (a, ya, again)):
        want = oracle(jax.tree.map(np.asarray, inputs))
        assert rel_l2(y, want.y) <= 4e-3
        assert rel_l2(dx, want.dx) <= 6e-3
        assert rel_l2(experts.down, want.experts.down) <= 6e-3


def test_donation():
    mesh = mesh_of(4)
    inputs = make_inputs(64, 48, 32, 8, 2, dtype="bfloat16")
    f = jax.jit(lambda x, i, w, e: mok.moe(x, i, w, e, mesh=mesh), donate_argnums=(0, 3))
    want = np.asarray(f(*to_jax(inputs[:4])))
    for _ in range(5):
        args = jax.device_put(to_jax(inputs[:4]), jax.NamedSharding(mesh, P("expert")))
        assert_same_bits(f(*args), want)
        assert args[0].is_deleted()


def test_ahead_of_time_compilation():
    mesh = mesh_of(4)
    b = to_jax(make_inputs(64, 48, 32, 8, 2, dtype="bfloat16"))
    f = jax.jit(lambda x, i, w, e: mok.moe(x, i, w, e, mesh=mesh))
    compiled = f.lower(b.x, b.ids, b.weights, b.experts).compile()
    assert_same_bits(compiled(b.x, b.ids, b.weights, b.experts), f(b.x, b.ids, b.weights, b.experts))


def test_export_with_the_documented_check_disabled():
    mesh = mesh_of(4)
    b = to_jax(make_inputs(64, 48, 32, 8, 2, dtype="bfloat16"))
    f = jax.jit(lambda x, i, w, e: mok.moe(x, i, w, e, mesh=mesh))
    args = (b.x, b.ids, b.weights, b.experts)
    args = jax.device_put(args, jax.NamedSharding(mesh, P("expert")))
    checks = [jax.export.DisabledSafetyCheck.custom_call(t) for t in ("jax_mok_forward", "jax_mok_backward")]
    jax.export.register_namedtuple_serialization(mok.Experts, serialized_name="jax_mok.Experts")
    blob = jax.export.export(f, disabled_checks=checks)(*args).serialize()
    assert_same_bits(jax.export.deserialize(blob).call(*args), f(*args))


_SECOND_PROCESS = """
import sys, hashlib, jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, {tests!r})
from layer_cases import make_inputs, mesh_of, run_layer
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hit" in name else None)
got = run_layer(make_inputs(64, 48, 32, 8, 2, dtype="bfloat16"), mesh_of(4))
print(len(hits), hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in jax.tree.leaves(got))).hexdigest())
"""


def test_persistent_compilation_cache_in_a_second_process(tmp_path):
    env = dict(
        os.environ,
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    code = _SECOND_PROCESS.format(tests=os.path.dirname(__file__))
    runs = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
        for _ in range(2)
    ]
    assert all(r.returncode == 0 for r in runs), runs[-1].stderr[-2000:]
    (first_hits, first), (second_hits, second) = (r.stdout.split() for r in runs)
    assert first == second
    assert int(second_hits) > int(first_hits) == 0


def test_new_routes_every_step_need_no_new_program():
    mesh = mesh_of(4)
    f = jax.jit(lambda x, i, w, e: mok.moe(x, i, w, e, mesh=mesh))
    for seed in range(20):
        b = make_inputs(64, 48, 32, 8, 2, dtype="bfloat16", seed=seed)
        assert rel_l2(f(*to_jax(b[:4])), oracle(b).y) <= 4e-3
    assert f._cache_size() == 1


def test_shapes_alternate_in_one_process():
    small, large = make_inputs(32, 48, 32, 8, 2, dtype="bfloat16"), make_inputs(512, 64, 80, 16, 4, dtype="bfloat16")
    for _ in range(3):
        for b in (small, large):
            assert_accurate(run_layer(b, mesh_of(4)), oracle(b), "bfloat16")


def test_committed_and_uncommitted_inputs():
    """Another sharding of some input compiles another program on the same arena."""
    mesh = mesh_of(4)
    b = to_jax(make_inputs(64, 48, 32, 8, 2, dtype="bfloat16"))
    f = jax.jit(lambda step, x, i, w, e: mok.moe(x * step, i, w, e, mesh=mesh))
    one = jnp.ones((), jnp.bfloat16)
    want = f(one, b.x, b.ids, b.weights, b.experts)
    replicated = jax.NamedSharding(mesh, P())
    assert_same_bits(f(jax.device_put(one, replicated), b.x, b.ids, b.weights, b.experts), want)
    for spec in (P(), P(None, "expert"), P("expert")):
        x = jax.device_put(b.x, jax.NamedSharding(mesh, spec))
        assert_same_bits(f(one, x, b.ids, b.weights, b.experts), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_callers_shard_map_with_a_scan(check_vma):
    inputs = make_inputs(64, 48, 32, 8, 2, shared=16)
    b, mesh = to_jax(inputs), mesh_of(4)
    specs = (P("expert"), P("expert"), mok.Experts(*[P("expert")] * 3), mok.Experts(*[P()] * 3), P("expert"))

    def local(x, weights, experts, shared, ids):
        def body(c, _):
            return mok.local_moe(c, ids, weights, experts, shared), None

        return jax.lax.scan(body, x, None, length=1)[0]

    def step(x, weights, experts, shared, dy):
        f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("expert"), check_vma=check_vma)
        y, pull = jax.vjp(lambda *a: f(*a, b.ids), x, weights, experts, shared)
        return y, *pull(dy)

    y, dx, dw, experts, shared = jax.jit(step)(b.x, b.weights, b.experts, b.shared, b.dy)
    want = oracle(inputs)
    assert_accurate(type(want)(y, dx, dw, experts, shared), want, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", ["cpu", "xla", "reference"])
@pytest.mark.usefixtures("quickly_compiled", "no_implicit_promotion")
def test_no_implicit_promotion(backend, dtype):
    inputs = make_inputs(64, 48, 32, 8, 2, dtype=dtype, shared=16)
    assert_accurate(run_layer(inputs, mesh_of(4), mok.MoEConfig(backend=backend)), oracle(inputs), dtype)


def test_ambient_mesh():
    inputs = make_inputs(64, 48, 32, 8, 2, dtype="bfloat16")
    want = run_layer(inputs, mesh_of(4))
    with jax.set_mesh(mesh_of(4)):
        assert_same_bits(run_layer(inputs, None), want)


def test_stats():
    inputs = make_inputs(64, 48, 32, 8, 2, dtype="bfloat16")
    counts = np.bincount(inputs.ids[inputs.ids >= 0], minlength=8)
    for backend in ("cpu", "xla", "reference"):
        for mesh in (None, mesh_of(4), mesh_of(2, 4, names=("data", "expert"))):
            config = mok.MoEConfig(backend=backend)
            y, stats = jax.jit(lambda b, c=config, m=mesh: mok.moe(*b, mesh=m, config=c, with_stats=True))(
                to_jax(inputs[:4])
            )
            assert y.shape == (64, 48)
            np.testing.assert_array_equal(stats.tokens_per_expert, counts)
            assert int(stats.status) == 0
            assert stats.rows_per_rank.shape == ((4,) if mesh is not None else (1,))
            if mesh is None or "data" not in mesh.axis_names:
                assert int(stats.rows_per_rank.sum()) == counts.sum()


def test_training_in_bf16_follows_float32():
    """64 SGD steps with float32 master weights: the bf16 layer's loss stays within bf16 noise of the reference's."""
    inputs = make_inputs(64, 48, 64, 8, 2)
    x, ids, weights, experts, _, target = to_jax(inputs)
    mesh = mesh_of(4)

    def losses(backend, dtype):
        def loss(experts):
            w = jax.tree.map(lambda a: a.astype(dtype), experts)
            y = mok.moe(x.astype(dtype), ids, weights, w, mesh=mesh, config=mok.MoEConfig(backend=backend))
            return ((y.astype(jnp.float32) - target) ** 2).mean()

        step = jax.jit(jax.value_and_grad(loss))
        w, out = experts, []
        for _ in range(64):
            value, grads = step(w)
            assert all(g.dtype == jnp.float32 for g in grads)
            w = jax.tree.map(lambda a, g: a - 3.0 * g, w, grads)
            out.append(float(value))
        return np.array(out)

    got, want = losses("cpu", jnp.bfloat16), losses("reference", jnp.float32)
    assert want[-1] < 0.9 * want[0]
    assert np.abs(got / want - 1).max() < 0.01
