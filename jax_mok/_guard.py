"""Identity operations that refuse, at trace time and by name, the transformations the fused calls cannot follow.

``custom_vjp`` on its own answers ``jvp`` and ``vmap`` with messages about JAX's insides.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_VMAP = (
    "jax_mok layers cannot be vmapped: one call is one exchange between the ranks of an EP group. The layer takes any "
    "number of leading dimensions, so drop the vmap and pass x [B, S, H] with expert_ids and router_weights [B, S, K]; "
    "or use jax.lax.map."
)
_JVP = (
    "jax_mok layers have reverse-mode gradients only (jax.grad, jax.vjp); forward mode (jax.jvp, jax.jacfwd, "
    "jax.linearize, jax.hessian) is not supported. Use MoEConfig(backend='xla') where it is needed."
)
_SECOND = (
    "jax_mok layers have first derivatives only. Use MoEConfig(backend='xla') where second derivatives are needed."
)


def _identity_primitive(name: str) -> Primitive:
    p = Primitive(name)
    p.multiple_results = True
    p.def_impl(lambda *args: list(args))
    p.def_abstract_eval(lambda *avals: list(avals))
    mlir.register_lowering(p, lambda ctx, *args: list(args))

    def refuse_batching(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(_VMAP)

    batching.primitive_batchers[p] = refuse_batching
    return p


_reverse_only_p = _identity_primitive("jax_mok_reverse_mode_only")
_first_order_p = _identity_primitive("jax_mok_first_order_only")
_constant_p = _identity_primitive("jax_mok_constant")
_tangent_p = Primitive("jax_mok_tangent")


def _refuse_forward(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(_JVP)


# The tangent passes through an operation that can be transposed (so reverse mode works) and not evaluated.
_tangent_p.def_abstract_eval(lambda aval: aval)
_tangent_p.def_impl(_refuse_forward)
mlir.register_lowering(_tangent_p, _refuse_forward)
batching.primitive_batchers[_tangent_p] = _refuse_forward
ad.primitive_transposes[_tangent_p] = lambda ct, _: [ct]


def _reverse_only_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    out = _reverse_only_p.bind(*primals)
    return out, [t if type(t) is ad.Zero else _tangent_p.bind(t) for t in tangents]


def _refuse_second(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(_SECOND)


def _no_tangents(primals: Any, _: Any) -> tuple[Any, Any]:
    out = _constant_p.bind(*primals)
    return out, [ad.Zero(jax.typeof(p).to_tangent_aval()) for p in out]


ad.primitive_jvps[_constant_p] = _no_tangents
ad.primitive_jvps[_reverse_only_p] = _reverse_only_jvp
ad.primitive_jvps[_first_order_p] = _refuse_second


def _through(p: Primitive, tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, p.bind(*leaves))


def reverse_mode_only(tree: Any) -> Any:
    """``tree``, refusing forward-mode differentiation and vmap."""
    return _through(_reverse_only_p, tree)


def first_order_only(tree: Any) -> Any:
    """``tree``, refusing any differentiation and vmap."""
    return _through(_first_order_p, tree)


def constant(tree: Any) -> Any:
    """``tree``, cut off from differentiation. (``stop_gradient`` leaves integers as they are, and ``custom_vjp`` gives
    its integer outputs tangents, which not every operation takes.)"""
    return _through(_constant_p, tree)
