"""What an error means that comes when a backward is made, at the first backward: it is too late to leave a node to eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from pure_backend.errors import LoweringError, PureBackendError
from pure_backend.jax_bridge.lower import lower

_LONGEST = 2000  # characters of a message; XLA's can be megabytes


def late_failure(jaxpr: Any, platform: str, error: Exception) -> PureBackendError:
    """An error of making the backward, with the operators that it comes from and the user's lines.

    Args:
        jaxpr: The backward, closed.
        platform: It is lowered for.
        error: What was raised; one of ours is returned as it is.
    """
    if isinstance(error, PureBackendError):
        return error
    where = list(dict.fromkeys(_failing(jaxpr.jaxpr, platform))) or ["- no operator fails by itself"]
    text = f"the backward of a compiled graph cannot be made: {type(error).__name__}: {error}"[:_LONGEST]
    advice = "the forward has run already; mark the function with pure_backend.impure to leave it to eager"
    return LoweringError("\n".join([text, *where, advice]))


def _failing(jaxpr: Any, platform: str) -> Iterator[str]:
    """The equations that do not lower by themselves; of those with equations inside the inner ones."""
    for eqn in jaxpr.eqns:
        if not _lowers(jaxpr, eqn, platform):
            inner = [line for body in core.subjaxprs(jaxpr.replace(eqns=[eqn])) for line in _failing(body, platform)]
            yield from inner or [_place(eqn)]


def _lowers(jaxpr: Any, eqn: Any, platform: str) -> bool:
    inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))
    names = jaxpr.debug_info._replace(arg_names=("",) * len(inputs), result_paths=("",) * len(eqn.outvars))
    alone = jaxpr.replace(constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn], debug_info=names)
    try:
        lower(core.ClosedJaxpr(alone, []), platform, "equation")
    except Exception:  # which is what is asked
        return False
    return True


def _place(eqn: Any) -> str:
    from jax._src import source_info_util

    avals = ", ".join(jax.typeof(v.val).str_short() if isinstance(v, core.Literal) else v.aval.str_short() for v in eqn.invars)
    scope = str(eqn.source_info.name_stack)
    return f"- {eqn.primitive.name}({avals}){f' in {scope}' if scope else ''} at {source_info_util.summarize(eqn.source_info)}"
