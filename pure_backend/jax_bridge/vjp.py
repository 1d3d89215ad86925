"""Forward with residuals, and backward, from one jaxpr.

    forward(*inputs, key)             -> (*outputs, *residuals)
    backward(*residuals, *cotangents) -> gradients of the differentiable inputs

A residual that *is* an input is not returned: the input is saved instead. Torch's gradient of a complex value is the conjugate
of JAX's (pytorch issue 41857), so complex cotangents are conjugated on the way in and gradients on the way out.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from pure_backend.ir.positions import with_values
from pure_backend.jax_bridge.conjugation import conjugate
from pure_backend.jax_bridge.jaxprs import dce_jaxpr, with_outputs
from pure_backend.jax_bridge.lowerings.values import COPY, DEAR
from pure_backend.jax_bridge.trace import tracing


@dataclasses.dataclass(frozen=True)
class Residual:
    """Where the backward finds one of its residuals: an input of the program, or one of the forward's extra outputs."""

    input: int | None
    fresh: int | None


@dataclasses.dataclass(frozen=True)
class Derivative:
    """A differentiated program.

    Attributes:
        forward: Closed jaxpr `(*inputs) -> (*outputs, *fresh residuals)`.
        residuals: The residuals of the backward, in order.
        backward: Function `(residuals, cotangents) -> gradients`.
        avals: The residuals' abstract values.
    """

    forward: Any
    residuals: tuple[Residual, ...]
    backward: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]

    @functools.cached_property
    def order(self) -> str:
        """A hash of the forward's equations and of what they read: equal ones return their residuals in the same order."""
        number: dict[Any, int] = {}
        inner = self.forward.jaxpr
        for v in (*inner.constvars, *inner.invars, *(v for eqn in inner.eqns for v in eqn.outvars)):
            number[v] = len(number)
        lines = [f"{eqn.primitive} {_numbers(eqn.invars, number)} {[v.aval for v in eqn.outvars]}" for eqn in inner.eqns]
        text = "\n".join([*lines, _numbers(inner.outvars, number)])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def fresh(self) -> int:
        """How many residuals the forward returns."""
        return sum(residual.fresh is not None for residual in self.residuals)


def _numbers(atoms: Sequence[Any], number: dict[Any, int]) -> str:
    return ", ".join("literal" if isinstance(atom, core.Literal) else str(number[atom]) for atom in atoms)


def differentiate(
    jaxpr: Any,
    inputs: Sequence[int],
    outputs: Sequence[int],
    remat: str | Callable[..., Any],
    written: frozenset[int] = frozenset(),
) -> Derivative:
    """Split a program into forward and backward.

    Args:
        jaxpr: Closed jaxpr of the program.
        inputs: Positions of the inputs to differentiate by.
        outputs: Positions of the outputs that carry a gradient.
        remat: The residual policy, see `Options.remat`.
        written: Positions of inputs that are written after the forward: as residuals they are returned, not referred to.
    """
    function = core.jaxpr_as_fun(jaxpr)
    store: dict[str, Any] = {}

    def forward(*args):
        def differentiated(*chosen):
            results = function(*with_values(args, inputs, chosen))
            return tuple(results[i] for i in outputs), results

        chosen = tuple(args[i] for i in inputs)
        _, vjp, results = jax.vjp(rematerialized(differentiated, remat), *chosen, has_aux=True)
        leaves, store["tree"] = jax.tree.flatten(vjp)
        return (*results, *leaves)

    avals = [_aval(v) for v in jaxpr.jaxpr.invars]
    with tracing():
        forward_jaxpr = jax.make_jaxpr(forward)(*avals)
    cotangents = tuple(_aval(jaxpr.jaxpr.outvars[i]) for i in outputs)
    return _split(forward_jaxpr, len(jaxpr.jaxpr.outvars), store["tree"], cotangents, written)


def rematerialized(function: Callable[..., Any], remat: str | Callable[..., Any]) -> Callable[..., Any]:
    """A function with a residual policy for its derivative."""
    if remat == "none":
        return function
    policy = remat if callable(remat) else {"auto": _keep_dear, "full": _keep_nothing}[remat]
    return jax.checkpoint(function, policy=_of_real_values(policy), prevent_cse=False)


def _of_real_values(policy: Callable[..., Any]) -> Callable[..., Any]:
    """A policy that keeps the user's copies, but no complex values: `jax.checkpoint` fails where it rounds those that are
    used in the forward too.
    """

    def keep(primitive: Any, *avals: Any, **params: Any) -> Any:
        makes_complex = primitive.name in ("complex", "fft", "eig")
        if makes_complex or any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in avals if hasattr(a, "dtype")):
            return False
        return params.get("name") == COPY or policy(primitive, *avals, **params)

    return keep


def _keep_nothing(*_: Any, **__: Any) -> bool:
    return False


_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "pallas_call", "custom_call", "ffi_call", "sort", "top_k"})
_LOOPS = frozenset({"scan", "while", "cholesky", "lu", "qr", "eigh", "svd", "reduce_window", "reduce_window_max"})


def _keep_dear(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep what is dear to compute again: products, convolutions, kernels, sorts, loops, factorizations, softmax."""
    return primitive.name in _PRODUCTS or primitive.name in _LOOPS or params.get("name") == DEAR


def _split(forward: Any, outputs: int, tree: Any, cotangents: tuple, written: frozenset[int]) -> Derivative:
    """The derivative by a forward and its vjp, without residuals that are inputs, repeat, or are not read."""
    saved = forward.jaxpr.outvars[outputs:]
    pullback, used = _pullback(tree, saved, cotangents)
    position = {v: i for i, v in enumerate(forward.jaxpr.invars) if i not in written}
    fresh: dict[Any, int] = {}
    residuals: dict[Any, Residual] = {}
    needed = list(itertools.compress(saved, used))
    for atom in needed:
        if isinstance(atom, core.Literal) or atom in residuals:
            continue
        if atom in position:
            residuals[atom] = Residual(position[atom], None)
        else:
            residuals[atom] = Residual(None, fresh.setdefault(atom, len(fresh)))
    kept = [*forward.jaxpr.outvars[:outputs], *fresh]
    forward = core.ClosedJaxpr(with_outputs(forward.jaxpr, kept), forward.consts)
    slot = {atom: i for i, atom in enumerate(residuals)}
    given = used[len(saved) :]

    def backward(values, cotangents):
        leaves = [atom.val if isinstance(atom, core.Literal) else values[slot[atom]] for atom in needed]
        return tuple(pullback(*leaves, *itertools.compress(cotangents, given)))

    return Derivative(forward, tuple(residuals.values()), backward, tuple(map(_aval, residuals)))


def _pullback(tree: Any, saved: Sequence[Any], cotangents: tuple) -> tuple[Callable[..., Any], list[bool]]:
    """The vjp as a function of the leaves and cotangents it reads, and a mask of these among all."""

    def backward(leaves, cotangents):
        vjp = jax.tree.unflatten(tree, leaves)
        return tuple(conjugate(g) for g in vjp(tuple(conjugate(c) for c in cotangents)))

    with tracing():
        jaxpr = jax.make_jaxpr(backward)([_aval(v) for v in saved], cotangents)
    pruned, used = dce_jaxpr(jaxpr.jaxpr)
    return core.jaxpr_as_fun(core.ClosedJaxpr(pruned, jaxpr.consts)), used


def _aval(v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
