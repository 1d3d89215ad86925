"""Bounds on what XLA:CPU fuses into one kernel.

XLA:CPU fuses a chain of elementwise operators into each of its consumers, without a bound. A residual stream is such a chain
through all layers of a model: with layer norm each kernel of layer n computes the stream again from the first layer on, and
compile time and run time grow with the square of the depth (measured: forward and backward of 50 layers compile 105 s, with
bounds 6 s). So a barrier is put behind a value whose chain is long.

Before a product that sums over leading dimensions, such as the gradient of a weight, XLA puts a copy with these last, and
XLA:CPU fuses the chain into that copy: it then computes in the order of the transposed result, and reads each operand
of the chain with a stride (measured: the gradient of a gated layer's weight 2.1 and 2.6 ms, with a barrier 1.3 and 0.7, in
jaxlib 0.8 and 0.10). So a barrier is put behind such an operand, too.

XLA:CPU removes barriers before it fuses unless it gets `KEEP_BARRIERS`. Then no small loop (about 1 KiB) may have one: XLA:CPU
compiles small loops by other means, which do not support barriers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""The compile option that makes XLA:CPU keep barriers until it has fused."""

Chain = frozenset[tuple[int, int]]
"""The operators that one kernel would compute for a value, each as (equation, output index)."""

_LONGEST = 32
_LONGEST_SHARED = 8  # of a value with several consumers, each of which computes the chain again
_PRODUCTS = ("dot_general", "conv_general_dilated", "fft", "cholesky", "lu", "qr", "eigh", "svd", "triangular_solve")
_CALLS = ("scan", "while", "cond", "pallas_call", "custom_call", "ffi_call", "sort", "top_k", "argmax", "argmin")
_UNFUSED = frozenset((*_PRODUCTS, *_CALLS, "optimization_barrier"))
_UNFUSED_FAMILIES = ("reduce", "cum", "scatter", "random", "threefry")


def bounded(jaxpr: Any) -> Any:
    """An open jaxpr with barriers behind the values of long chains; the same object if it has none."""
    uses = Counter(v for eqn in jaxpr.eqns for v in {v for v in eqn.invars if isinstance(v, core.Var)})
    uses.update(v for v in jaxpr.outvars if isinstance(v, core.Var))
    copied = {v for eqn in jaxpr.eqns for v in _transposed(eqn)}
    chains: dict[Any, Chain] = {}
    eqns: list[Any] = []
    for i, eqn in enumerate(jaxpr.eqns):
        found = dict(zip(eqn.outvars, _chains(i, eqn, chains), strict=True))
        # A value that XLA copies in another order ends its chain at once; else the copy computes the chain with strides.
        bound = {v: 0 if v in copied else _LONGEST_SHARED if uses[v] > 1 else _LONGEST for v in found}
        long = [v for v, chain in found.items() if len(chain) > bound[v]]
        eqns += _behind_barrier(eqn, long) if long else [eqn]
        chains.update((v, chain) for v, chain in found.items() if v not in long)
    return jaxpr if len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def unbounded(jaxpr: Any) -> Any:
    """An open jaxpr without barriers, for small loops; the same object if it has none."""
    eqns = [_without_barrier(eqn) for eqn in jaxpr.eqns]
    same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _without_barrier(eqn: Any) -> Any:
    """The equation; in the place of a barrier, a function that returns its arguments; `jax.checkpoint` makes none."""
    if eqn.params.get("prevent_cse"):
        return eqn.replace(params={**eqn.params, "prevent_cse": False})
    if eqn.primitive is not lax.optimization_barrier_p:
        return eqn
    avals = [v.aval for v in eqn.invars]
    call = jax.make_jaxpr(jax.jit(lambda *values: values))(*avals).eqns[0]
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _transposed(eqn: Any) -> list[Any]:
    """The operands of a product that XLA first copies, with another dimension last.

    It copies unless there is one dimension to sum over, at most one other in each operand, and batch dimensions come first
    (xla/hlo/transforms/expanders/dot_decomposer.cc).
    """
    if eqn.primitive is not lax.dot_general_p:
        return []
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = eqn.invars
    first = tuple(range(len(lhs_batch)))
    narrow = max(lhs.aval.ndim, rhs.aval.ndim) <= len(first) + 2
    if len(lhs_summed) == 1 and narrow and (tuple(lhs_batch), tuple(rhs_batch)) == (first, first):
        return []
    orders = (
        (lhs, [*lhs_batch, *_others(lhs, lhs_batch, lhs_summed), *lhs_summed]),
        (rhs, [*rhs_batch, *rhs_summed, *_others(rhs, rhs_batch, rhs_summed)]),
    )
    return [v for v, order in orders if isinstance(v, core.Var) and _last(v, order) != _last(v, range(v.aval.ndim))]


def _others(v: Any, batch: Sequence[int], summed: Sequence[int]) -> list[int]:
    return [i for i in range(v.aval.ndim) if i not in batch and i not in summed]


def _last(v: Any, order: Sequence[int]) -> int | None:
    """The last dimension in an order that has more than one element."""
    return next((i for i in reversed(order) if v.aval.shape[i] != 1), None)


def _chains(i: int, eqn: Any, chains: dict[Any, Chain]) -> list[Chain]:
    """The chain of each result of equation i, from those of its operands."""
    name = eqn.primitive.name
    if name in _UNFUSED or name.startswith(_UNFUSED_FAMILIES) or not all(map(_is_numeric, eqn.outvars)):
        return [frozenset()] * len(eqn.outvars)
    # A set, since a value that reaches an operator by two paths is computed once; a sum of lengths would count it twice.
    before = frozenset[tuple[int, int]]().union(*(chains.get(v, ()) for v in eqn.invars if isinstance(v, core.Var)))
    bodies = [value for value in eqn.params.values() if isinstance(value, (core.ClosedJaxpr, core.Jaxpr))]
    body = getattr(bodies[0], "jaxpr", bodies[0]) if bodies else None
    lengths = [1] * len(eqn.outvars) if body is None else _lengths(body)
    return [before.union((i, k) for k in range(length)) if length else frozenset() for length in lengths]


def _lengths(body: Any) -> list[int]:
    """How long the chain of each result of a function is, its own operators alone."""
    chains: dict[Any, Chain] = {}
    for i, eqn in enumerate(body.eqns):
        chains.update(zip(eqn.outvars, _chains(i, eqn, chains), strict=True))
    return [len(chains.get(v, ())) if isinstance(v, core.Var) else 0 for v in body.outvars]


def _is_numeric(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_)


def _behind_barrier(eqn: Any, long: Sequence[Any]) -> list[Any]:
    """The equation, and a barrier between some of its results and those who use them."""
    inner = {v: core.Var(v.aval) for v in long}
    barrier = eqn.replace(
        primitive=lax.optimization_barrier_p, params={}, invars=list(inner.values()), outvars=list(inner), effects=frozenset()
    )
    return [eqn.replace(outvars=[inner.get(v, v) for v in eqn.outvars]), barrier]
