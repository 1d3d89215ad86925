"""Rewriting jaxprs, those inside of equations first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend import core


def rewritten(jaxpr: Any, rewrite: Callable[[Any], Any]) -> Any:
    """A closed jaxpr with `rewrite` applied to it and to every jaxpr inside of it; the same object if nothing changes.

    Args:
        jaxpr: A closed jaxpr.
        rewrite: From an open jaxpr, whose inner ones are rewritten already, to another; it returns its argument to leave it
            alone. A jaxpr that several equations share is rewritten once, so that it stays one function of the HLO. Bodies of
            Pallas kernels are left alone: they are another language.
    """
    inner = _Rewriter(rewrite).open(jaxpr.jaxpr)
    return jaxpr if inner is jaxpr.jaxpr else core.ClosedJaxpr(inner, jaxpr.consts)


class _Rewriter:
    def __init__(self, rewrite: Callable[[Any], Any]) -> None:
        self.rewrite = rewrite
        self.done: dict[Any, Any] = {}

    def open(self, jaxpr: Any) -> Any:
        if jaxpr not in self.done:
            eqns = [self.equation(eqn) for eqn in jaxpr.eqns]
            same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
            self.done[jaxpr] = self.rewrite(jaxpr if same else jaxpr.replace(eqns=eqns))
        return self.done[jaxpr]

    def closed(self, jaxpr: Any) -> Any:
        inner = self.open(jaxpr.jaxpr)
        if inner is jaxpr.jaxpr:
            return jaxpr
        if jaxpr not in self.done:
            self.done[jaxpr] = core.ClosedJaxpr(inner, jaxpr.consts)
        return self.done[jaxpr]

    def equation(self, eqn: Any) -> Any:
        if eqn.primitive.name == "pallas_call":
            return eqn
        params = {name: self.parameter(value) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return eqn.replace(params=params) if changed else eqn

    def parameter(self, value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, core.Jaxpr):
            return self.open(value)
        if isinstance(value, (tuple, list)) and any(isinstance(part, (core.ClosedJaxpr, core.Jaxpr)) for part in value):
            parts = [self.parameter(part) for part in value]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
        return value
