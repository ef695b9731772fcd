"""Bad input: an error at trace time that says what was given, what is allowed and what to do."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_cases import make_inputs, mesh_of, rel_l2

import jax_mok as mok


@pytest.fixture
def inputs():
    return jax.tree.map(jnp.asarray, make_inputs(16, 48, 32, 8, 2, dtype="bfloat16", shared=16))


def layer(i, config=mok.MoEConfig(), **kwargs):  # noqa: B008
    return mok.moe(i.x, i.ids, i.weights, i.experts, shared=i.shared, config=config, **kwargs)


DTYPES = {
    "x float16": (lambda i: i._replace(x=i.x.astype(jnp.float16)), TypeError, r"float16.*bfloat16.*astype"),
    "x int": (lambda i: i._replace(x=i.x.astype(jnp.int32)), TypeError, r"int32.*astype"),
    "ids float": (lambda i: i._replace(ids=i.ids.astype(jnp.float32)), TypeError, r"expert_ids.*int32"),
    "ids int8": (lambda i: i._replace(ids=i.ids.astype(jnp.int8)), TypeError, r"expert_ids.*astype\(jnp.int32\)"),
    "weights bf16": (
        lambda i: i._replace(weights=i.weights.astype(jnp.bfloat16)),
        TypeError,
        r"router_weights.*astype\(jnp.float32\)",
    ),
    "experts in another dtype": (
        lambda i: i._replace(experts=i.experts._replace(up=i.experts.up.astype(jnp.float32))),
        TypeError,
        r"experts.up is float32 but x is bfloat16.*astype",
    ),
    "shared in another dtype": (
        lambda i: i._replace(shared=i.shared._replace(down=i.shared.down.astype(jnp.float32))),
        TypeError,
        r"shared.down is float32",
    ),
    "master weights for the experts alone": (
        lambda i: i._replace(experts=mok.Experts(*(w.astype(jnp.float32) for w in i.experts))),
        TypeError,
        r"shared.gate is bfloat16.*experts.gate float32.*shared.gate.astype\(jnp.float32\)",
    ),
    "weights below the dtype of x": (
        lambda i: i._replace(x=i.x.astype(jnp.float32)),
        TypeError,
        r"experts.gate is bfloat16 but x is float32.*astype\(jnp.float32\)",
    ),
    "weights float16": (
        lambda i: i._replace(experts=mok.Experts(*(w.astype(jnp.float16) for w in i.experts))),
        TypeError,
        r"experts.gate is float16.*experts.gate.astype\(jnp.bfloat16\)",
    ),
    "experts as a list": (lambda i: i._replace(experts=list(i.experts)), TypeError, r"mok.Experts\(gate, up, down\)"),
}
SHAPES = {
    "ids of other tokens": (lambda i: i._replace(ids=i.ids[:8]), r"expert_ids.*leading dimensions"),
    "weights of other slots": (lambda i: i._replace(weights=i.weights[:, :1]), r"router_weights.*\[16, 2\]"),
    "no slots": (lambda i: i._replace(ids=i.ids[:, :0], weights=i.weights[:, :0]), r"K >= 1"),
    "gate of another hidden size": (
        lambda i: i._replace(experts=i.experts._replace(gate=i.experts.gate[:, :40])),
        r"H = 48.*\[8, 40, 32\]",
    ),
    "down not transposed": (
        lambda i: i._replace(experts=i.experts._replace(down=i.experts.gate)),
        r"down \[E, I, H\].*\[8, 48, 32\]",
    ),
    "up of another width": (
        lambda i: i._replace(experts=i.experts._replace(up=i.experts.up[:, :, :8])),
        r"same E and I.*\[8, 48, 8\]",
    ),
    "shared with an expert dimension": (lambda i: i._replace(shared=i.experts), r"shared needs gate, up \[H, I\]"),
}


@pytest.mark.parametrize("case", DTYPES)
def test_dtypes(case, inputs):
    change, error, words = DTYPES[case]
    with pytest.raises(error, match=words):
        jax.eval_shape(layer, change(inputs))


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case, inputs):
    change, words = SHAPES[case]
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(layer, change(inputs))


@pytest.mark.parametrize(("E", "P_"), [(6, 4), (2, 4)])
def test_experts_that_do_not_divide(E, P_):
    i = jax.tree.map(jnp.asarray, make_inputs(16, 48, 32, E, 2, dtype="bfloat16"))
    with pytest.raises(ValueError, match=rf"{E} experts.*{P_} devices.*'expert'"):
        layer(i, mesh=mesh_of(P_))


def test_tokens_that_do_not_divide(inputs):
    six = inputs._replace(experts=mok.Experts(*(w[:6] for w in inputs.experts)), shared=None)
    with pytest.raises(ValueError, match=r"16 tokens.*3 devices.*Pad.*multiple of 3"):
        layer(six, mesh=mesh_of(3))


def test_axes(inputs):
    mesh = mesh_of(2, 2, names=("data", "expert"))
    with pytest.raises(ValueError, match=r"no axis 'ep'.*data.*expert"):
        layer(inputs, mesh=mesh, axis="ep")
    with pytest.raises(ValueError, match=r"names \['rows'\]"):
        layer(inputs, mesh=mesh, token_axes=("rows", "expert"))
    with pytest.raises(ValueError, match="must contain the EP axis 'expert'"):
        layer(inputs, mesh=mesh, token_axes=("data",))
    with pytest.raises(ValueError, match="not a manual axis"):
        mok.local_moe(*inputs[:4])


def test_config():
    for field, value in (
        ("backend", "tpu"),
        ("residuals", "offload"),
        ("capacity_factor", 0),
        ("capacity_factor", float("nan")),
        ("timeout_s", -1.0),
        ("timeout_s", float("inf")),
        ("timeout_s", 1e6),
        ("first_call_timeout_s", 0),
        ("first_call_timeout_s", 1e6),
    ):
        with pytest.raises(ValueError, match=f"MoEConfig.{field} is"):
            mok.MoEConfig(**{field: value})
    assert hash(mok.MoEConfig()) == hash(mok.MoEConfig())
    with pytest.raises(AttributeError):
        mok.MoEConfig().timeout_s = 1


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("mesh", [None, 4])
def test_vmap_is_refused_by_name(inputs, mesh, jit):
    mesh = mesh and mesh_of(mesh)

    def f(x):
        return layer(inputs._replace(x=x), mesh=mesh)

    with pytest.raises(NotImplementedError, match=r"cannot be vmapped.*drop the vmap"):
        jax.vmap(jax.jit(f) if jit else f)(jnp.stack([inputs.x] * 2))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("mesh", [None, 4])
def test_forward_mode_is_refused_by_name(inputs, mesh, jit):
    mesh = mesh and mesh_of(mesh)

    def f(x):
        return layer(inputs._replace(x=x), mesh=mesh).astype(jnp.float32).sum()

    f = jax.jit(f) if jit else f
    with pytest.raises(NotImplementedError, match=r"jax\.grad.*backend='xla'"):
        jax.jvp(f, (inputs.x,), (inputs.x,))
    with pytest.raises(NotImplementedError, match="backend='xla'"):
        jax.hessian(f)(inputs.x)
    with pytest.raises(NotImplementedError, match="backend='xla'"):
        jax.grad(lambda x: (jax.grad(f)(x) ** 2).astype(jnp.float32).sum())(inputs.x)


def test_the_xla_backend_has_forward_mode(inputs):
    config = mok.MoEConfig(backend="xla")

    def f(x):
        return layer(inputs._replace(x=x), config).astype(jnp.float32)

    _, tangent = jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(inputs.x)
    assert np.isfinite(np.asarray(tangent)).all()


def test_a_backend_that_cannot_run_here_says_why(inputs):
    with pytest.raises(NotImplementedError, match=r"backend='cuda'.*cuda devices.*'cpu'.*backend='auto'"):
        layer(inputs, mok.MoEConfig(backend="cuda"))


def test_what_is_refused_between_gpus_only(monkeypatch):
    from jax_mok import runtime
    from jax_mok.backends import ffi
    from jax_mok.cli.doctor import _SMALL

    monkeypatch.setattr(runtime.cuda, "refusal", lambda: None)
    monkeypatch.setattr(runtime.cuda, "unlinked", lambda: [])
    pair = dataclasses.replace(_SMALL, ranks=2)
    assert ffi.refusal(pair, "cuda", "cuda") is None
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "CUDA_LAUNCH_BLOCKING" in ffi.refusal(pair, "cuda", "cuda")
    assert ffi.refusal(_SMALL, "cuda", "cuda") is None
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    monkeypatch.setattr(runtime.cuda, "unlinked", lambda: [(0, 1), (1, 0)])
    assert "GPU 0 cannot read the memory of GPU 1" in ffi.refusal(pair, "cuda", "cuda")
    assert ffi.refusal(_SMALL, "cuda", "cuda") is None


def test_auto_falls_back_and_says_so_once(inputs, monkeypatch):
    from jax_mok import backends

    monkeypatch.setattr(backends.ffi, "refusal", lambda *_: "no kernel fits this test")
    backends.say_once.cache_clear()
    with pytest.warns(UserWarning, match=r"no kernel fits this test.*backend='xla'"):
        y = layer(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(inputs)
    assert rel_l2(y, layer(inputs, mok.MoEConfig(backend="reference"))) < 1e-2


def test_an_axis_that_is_not_manual(inputs):
    mesh = mesh_of(2, 4, names=("data", "expert"))
    specs = (P("expert"), P("expert"), P("expert"), mok.Experts(*[P("expert")] * 3))
    f = jax.shard_map(
        lambda *a: mok.local_moe(*a, config=mok.MoEConfig(backend="cpu")),
        mesh=mesh,
        in_specs=specs,
        out_specs=P("expert"),
        axis_names={"expert"},
    )
    with pytest.raises(NotImplementedError, match=r"\['data'\] are not manual"):
        jax.jit(f)(*inputs[:4])


def test_no_tokens(inputs):
    empty = inputs._replace(x=inputs.x[:0], ids=inputs.ids[:0], weights=inputs.weights[:0])
    for mesh in (None, mesh_of(4)):
        y, pull = jax.vjp(lambda x, e, m=mesh: layer(empty._replace(x=x, experts=e), mesh=m), empty.x, empty.experts)
        assert y.shape == (0, 48)
        dx, experts = pull(y)
        assert dx.shape == (0, 48)
        assert not any(np.asarray(g, np.float32).any() for g in experts)


def test_one_token_without_leading_dimensions(inputs):
    one = inputs._replace(x=inputs.x[3], ids=inputs.ids[3], weights=inputs.weights[3])
    assert layer(one).shape == (48,)
    np.testing.assert_array_equal(layer(one), layer(inputs)[3])


def test_typed_errors_leave_other_errors_alone():
    with pytest.raises(KeyError), mok.typed_errors():
        raise KeyError("not ours")
    assert mok.as_typed(ValueError("not ours")) is None
    with pytest.raises(mok.CapacityError), mok.typed_errors():
        raise mok.CapacityError("ours already")
