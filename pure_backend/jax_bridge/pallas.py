"""Pallas kernels where no Mosaic compiler is: interpreted, that is, lowered to plain HLO that any platform runs.

A kernel's author writes `pl.pallas_call(...)` and no flag. Whether it is interpreted is known when its program is lowered, from
the platform; so the flag is set in the jaxpr then, wherever in it a kernel stands.
"""

from __future__ import annotations

from typing import Any


def interpreted(jaxpr: Any) -> Any:
    """An open jaxpr with its kernels interpreted; the same object if it has none."""
    eqns = [_interpreted(eqn) for eqn in jaxpr.eqns]
    same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _interpreted(eqn: Any) -> Any:
    if eqn.primitive.name != "pallas_call" or eqn.params["interpret"]:
        return eqn
    return eqn.replace(params={**eqn.params, "interpret": True})
