"""Jaxprs with other outputs, without dead code, and rewritten from the inside out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax.extend import core

Rewrite = Callable[[Any], Any]

_LOOPS = ("scan", "while")
_SMALL_BYTES = 2**14


def primitives(jaxpr: Any) -> set[str]:
    """The names of all primitives in an open jaxpr and in those inside of it."""
    found = {eqn.primitive.name for eqn in jaxpr.eqns}
    return found.union(*map(primitives, set(core.subjaxprs(jaxpr))))


def dce_jaxpr(jaxpr: Any) -> tuple[Any, list[bool]]:
    """A jaxpr without dead code, and which of its inputs are left."""
    from jax._src.interpreters import partial_eval

    pruned, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[:2]
    return pruned, list(used)


def with_outputs(jaxpr: Any, outvars: list[Any]) -> Any:
    """A jaxpr with other outputs."""
    names = jaxpr.debug_info._replace(result_paths=("",) * len(outvars))
    return jaxpr.replace(outvars=outvars, debug_info=names)


def rewritten(jaxpr: Any, rewrite: Rewrite, in_small_loops: Rewrite) -> Any:
    """A closed jaxpr with every jaxpr in it rewritten; the same object if nothing changes.

    Args:
        jaxpr: A closed jaxpr.
        rewrite: From an open jaxpr, whose inner ones are rewritten already, to another; it returns its argument to leave it
            alone. A jaxpr that several equations share is rewritten once, so that it stays one function of the HLO. Bodies of
            Pallas kernels are left alone: they are another language.
        in_small_loops: The same, inside of loops with small results.
    """
    inner = _Rewriter(rewrite, in_small_loops).open(jaxpr.jaxpr, False)
    return jaxpr if inner is jaxpr.jaxpr else core.ClosedJaxpr(inner, jaxpr.consts)


class _Rewriter:
    def __init__(self, rewrite: Rewrite, in_small_loops: Rewrite) -> None:
        self.rewrites = {False: rewrite, True: in_small_loops}
        self.done: dict[tuple[Any, bool], Any] = {}

    def open(self, jaxpr: Any, looped: bool) -> Any:
        if (jaxpr, looped) not in self.done:
            eqns = [self.equation(eqn, looped) for eqn in jaxpr.eqns]
            same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
            self.done[jaxpr, looped] = self.rewrites[looped](jaxpr if same else jaxpr.replace(eqns=eqns))
        return self.done[jaxpr, looped]

    def closed(self, jaxpr: Any, looped: bool) -> Any:
        inner = self.open(jaxpr.jaxpr, looped)
        if inner is jaxpr.jaxpr:
            return jaxpr
        if (jaxpr, looped) not in self.done:
            self.done[jaxpr, looped] = core.ClosedJaxpr(inner, jaxpr.consts)
        return self.done[jaxpr, looped]

    def equation(self, eqn: Any, looped: bool) -> Any:
        if eqn.primitive.name == "pallas_call":
            return eqn
        looped = looped or _is_small_loop(eqn)
        params = {name: self.parameter(value, looped) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return eqn.replace(params=params) if changed else eqn

    def parameter(self, value: Any, looped: bool) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            return self.closed(value, looped)
        if isinstance(value, core.Jaxpr):
            return self.open(value, looped)
        if isinstance(value, (tuple, list)) and any(isinstance(part, (core.ClosedJaxpr, core.Jaxpr)) for part in value):
            parts = [self.parameter(part, looped) for part in value]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
        return value


def _is_small_loop(eqn: Any) -> bool:
    sizes = [math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.outvars if hasattr(v.aval, "dtype")]
    return eqn.primitive.name in _LOOPS and sum(sizes) < _SMALL_BYTES
