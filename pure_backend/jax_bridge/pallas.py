"""Pallas kernels where no Mosaic compiler is: interpreted, that is, lowered to plain HLO that any platform runs.

A kernel's author writes `pl.pallas_call(...)` and no flag. Whether it is interpreted is known when its program is lowered, from
the platform; so the flag is set in the jaxpr then, wherever in it a kernel stands.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core

_COMPILED_ON = ("tpu", "cuda")


def for_platform(jaxpr: Any, platform: str) -> Any:
    """A closed jaxpr whose kernels the platform can run."""
    if platform in _COMPILED_ON:
        return jaxpr
    inner = _interpreted(jaxpr.jaxpr)
    return jaxpr if inner is jaxpr.jaxpr else core.ClosedJaxpr(inner, jaxpr.consts)


def _interpreted(jaxpr: Any) -> Any:
    """A jaxpr with its kernels interpreted; the very same object if it has none."""
    eqns = [_equation(eqn) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _equation(eqn: Any) -> Any:
    if eqn.primitive.name == "pallas_call":
        return eqn if eqn.params["interpret"] else eqn.replace(params={**eqn.params, "interpret": True})
    params = {name: _parameter(value) for name, value in eqn.params.items()}
    changed = any(params[name] is not value for name, value in eqn.params.items())
    return eqn.replace(params=params) if changed else eqn


def _parameter(value: Any) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        inner = _interpreted(value.jaxpr)
        return value if inner is value.jaxpr else core.ClosedJaxpr(inner, value.consts)
    if isinstance(value, core.Jaxpr):
        return _interpreted(value)
    if isinstance(value, (tuple, list)) and any(isinstance(part, (core.ClosedJaxpr, core.Jaxpr)) for part in value):
        parts = [_parameter(part) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    return value
