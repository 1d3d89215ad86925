"""Constants that XLA:CPU shall not calculate with.

XLA divides by a scalar by multiplying with its inverse, and adds the constants of a chain first: `49 / 49` is then
0.99999994, of which `trunc` makes 0, and `(x + 2048) - 2048`, which rounds x, is x. In 16 bits most quotients by 1000 are wrong
by a unit. A divisor that is selected for each element is no scalar to it, and what stands behind a barrier no constant.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

_SUMS = (lax.add_p, lax.sub_p)


def exact_quotients(jaxpr: Any) -> Any:
    """An open jaxpr whose quotients by scalars are quotients; the same object if it has none."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqns = [_exact_quotient(eqn) if _divides_by_scalar(eqn, makers) else eqn for eqn in jaxpr.eqns]
    same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _divides_by_scalar(eqn: Any, makers: dict[Any, Any]) -> bool:
    if eqn.primitive is not lax.div_p or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return False
    divisor = eqn.invars[1]
    if isinstance(divisor, core.Literal):
        return math.frexp(float(divisor.val))[0] != 0.5  # the inverse of a power of two is exact
    if divisor.aval.ndim == 0:
        return eqn.outvars[0].aval.ndim > 0
    maker = makers.get(divisor)
    return maker is not None and maker.primitive is lax.broadcast_in_dim_p and maker.invars[0].aval.size == 1


def _exact_quotient(eqn: Any) -> Any:
    def divide(x, *divisor):
        scalar = divisor[0] if divisor else jnp.asarray(eqn.invars[1].val)
        return x / jnp.where(x == x, scalar, x)  # NaN divided by NaN is NaN

    operands = [v for v in eqn.invars if not isinstance(v, core.Literal)]
    if eqn.invars[0] not in operands:
        return eqn
    call = jax.make_jaxpr(jax.jit(divide))(*(v.aval for v in operands)).eqns[0]
    return call.replace(invars=operands, outvars=eqn.outvars, source_info=eqn.source_info)


def exact_sums(jaxpr: Any) -> Any:
    """An open jaxpr with the constants of sums of sums behind barriers; the same object if there are none."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if eqn.primitive in _SUMS}
    eqns = [new for eqn in jaxpr.eqns for new in _behind_barriers(eqn, _constants_of_chain(eqn, makers))]
    return jaxpr if len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def _constants_of_chain(eqn: Any, makers: dict[Any, Any]) -> list[int]:
    """The operands of a sum that are constants, if the other one is a sum with a constant."""
    if eqn.primitive not in _SUMS:
        return []
    inner = [makers[v] for v in eqn.invars if isinstance(v, core.Var) and v in makers]
    chained = any(any(map(_is_constant, e.invars)) for e in inner)
    return [i for i, v in enumerate(eqn.invars) if chained and _is_constant(v)]


def _is_constant(v: Any) -> bool:
    return isinstance(v, core.Literal) and jnp.issubdtype(v.aval.dtype, jnp.floating) and jnp.ndim(v.val) == 0


def _behind_barriers(eqn: Any, places: list[int]) -> list[Any]:
    """The equation, after a barrier for the operands in these places."""
    if not places:
        return [eqn]
    operands = list(eqn.invars)
    hidden = [core.Var(operands[i].aval) for i in places]
    given = [operands[i] for i in places]
    barrier = eqn.replace(primitive=lax.optimization_barrier_p, params={}, invars=given, outvars=hidden, effects=frozenset())
    for i, v in zip(places, hidden, strict=True):
        operands[i] = v
    return [barrier, eqn.replace(invars=operands)]
