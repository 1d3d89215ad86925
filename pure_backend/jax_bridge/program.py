"""A program and its executables, for one signature; lowered when first called, unless another process has stored them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from pure_backend import counters
from pure_backend.errors import PureBackendError
from pure_backend.ir.positions import with_values
from pure_backend.jax_bridge.conjugation import conjugate
from pure_backend.jax_bridge.custom_calls import calling_primitives
from pure_backend.jax_bridge.executables import Call as Call
from pure_backend.jax_bridge.executables import Executables, forward_metadata
from pure_backend.jax_bridge.jaxprs import dce_jaxpr, primitives, with_outputs
from pure_backend.jax_bridge.late import late_failure
from pure_backend.jax_bridge.rng import KEY
from pure_backend.jax_bridge.runtimes import Runtime
from pure_backend.jax_bridge.trace import tracing
from pure_backend.jax_bridge.vjp import Derivative, Residual, differentiate


class Program:
    """A function of tensors, differentiable to any order.

    Attributes:
        outputs: How many outputs it has.
        inputs: Positions of the inputs it is differentiated by; none for a program without gradient.
        differentiable: For each output, whether it carries a gradient.
        reach: For each output, the positions of the inputs whose gradient it contributes to.
        uses_key: Whether the random key is read.
        written: Positions of the inputs that the caller writes after the call.

    Args:
        jaxpr: The closed jaxpr `(*inputs, key) -> outputs`, or a function that makes it when something needs it: what is
            stored on disk needs none.
        executables: Where executables come from; by default none is stored.
    """

    def __init__(
        self,
        jaxpr: Any,
        inputs: tuple[int, ...],
        differentiable: tuple[bool, ...],
        reach: tuple[frozenset[int], ...],
        uses_key: bool,
        runtime: Runtime,
        remat: Any,
        written: frozenset[int] = frozenset(),
        executables: Executables | None = None,
    ) -> None:
        self._jaxpr = jaxpr
        self.inputs = inputs
        self.differentiable = differentiable
        self.reach = reach
        self.uses_key = uses_key
        self.runtime = runtime
        self.remat = remat
        self.written = written
        self.outputs = len(differentiable)
        self.executables = executables or Executables(runtime)
        self._gradients: dict[tuple[bool, ...], Program] = {}
        self._batched: dict[tuple[tuple[int | None, ...], int], Program] = {}
        self._backward_programs: dict[tuple[bool, ...], Program] = {}
        self._backwards: dict[tuple[bool, ...], Call] = {}
        self._lock = threading.RLock()

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr `(*inputs, key) -> outputs`."""
        with self._lock:
            if callable(self._jaxpr):
                self._jaxpr = self._jaxpr()
            return self._jaxpr

    @functools.cached_property
    def derivative(self) -> Derivative:
        """Forward and backward; made once, when a call that records gradients needs it.

        Raises:
            PureBackendError: The forward that runs, from the disk, is another one.
        """
        outputs = [i for i, carries in enumerate(self.differentiable) if carries]
        with counters.timed("differentiate"):
            derivative = differentiate(self.jaxpr, self.inputs, outputs, self.remat, self.written)
        stored = self.executables.forward
        if stored is not None and (stored.residuals, stored.order) != (derivative.residuals, derivative.order):
            raise PureBackendError(_OTHER_FORWARD)
        return derivative

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """Where the backward finds its residuals, in order."""
        stored = self.executables.forward
        return self.derivative.residuals if stored is None else stored.residuals

    @property
    def fresh(self) -> int:
        """How many residuals the forward returns."""
        return len({residual.fresh for residual in self.residuals} - {None}) if self.inputs else 0

    @functools.cached_property
    def forward(self) -> Call:
        """The executable `(*inputs, key) -> (*outputs, *fresh residuals)`, without residuals if nothing is differentiated."""
        with self._lock:
            stored = self.executables.forward
            return self._new_forward() if stored is None else stored.call

    def prepare(self) -> None:
        """Make what may fail while a failure still has a way out: the forward, and a backward with custom calls of its own.

        Raises:
            UnsupportedOperatorError: The runtime lacks what they call.
        """
        self.forward  # noqa: B018  (makes it)
        if not self.inputs or self.runtime.calls_jaxlib or self.executables.forward is not None:
            return
        present = (True,) * sum(self.differentiable)
        new = primitives(self.backward_jaxpr(present).jaxpr) - primitives(self.forward_jaxpr.jaxpr)
        if new & calling_primitives(self.runtime.platform):
            self.backward(present)

    @property
    def forward_jaxpr(self) -> Any:
        """What `forward` runs, before inputs that it does not read are dropped."""
        return self.derivative.forward if self.inputs else self.jaxpr

    def backward(self, present: tuple[bool, ...]) -> Call:
        """The executable `(*residuals, *present cotangents) -> gradients of the inputs`.

        Args:
            present: For each differentiable output, whether its cotangent is given; an absent one is zero in the program.

        Raises:
            LoweringError: With the operators that cannot be lowered and the user's lines.
        """
        with self._lock:
            if present not in self._backwards:
                role = "backward " + "".join("01"[here] for here in present)
                stored = self.executables.load(role)
                self._backwards[present] = self._new_backward(role, present) if stored is None else stored[0]
            return self._backwards[present]

    def backward_program(self, present: tuple[bool, ...]) -> Program:
        """`backward` as a program, which can be `batched`; it has no gradient of its own."""
        with self._lock:
            if present not in self._backward_programs:
                self._backward_programs[present] = self._backward_program(present)
            return self._backward_programs[present]

    def gradient(self, present: tuple[bool, ...]) -> Program:
        """The gradients as a program `(*inputs, *present cotangents, key) -> gradients`, for gradients of gradients."""
        with self._lock:
            if present not in self._gradients:
                self._gradients[present] = self._gradient_program(present)
            return self._gradients[present]

    def batched(self, dims: tuple[int | None, ...], size: int) -> Program:
        """The program over a batch, `jax.vmap` of this one; the batch is the first dimension of every output.

        Args:
            dims: For each input, the dimension of its batch; None where all members have the same.
            size: Of the batch.
        """
        with self._lock:
            if (dims, size) not in self._batched:
                self._batched[dims, size] = self._batched_program(dims, size)
            return self._batched[dims, size]

    def _new_forward(self) -> Call:
        residuals, order = (self.derivative.residuals, self.derivative.order) if self.inputs else ((), "")
        return self.executables.make("forward", self.forward_jaxpr, forward_metadata(self.uses_key, residuals, order))

    def _new_backward(self, role: str, present: tuple[bool, ...]) -> Call:
        jaxpr = self.backward_jaxpr(present)
        try:
            return self.executables.make(role, jaxpr, {})
        except Exception as error:
            raise late_failure(jaxpr, self.runtime.platform, error) from error

    def _cotangent_avals(self) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self.jaxpr.jaxpr.outvars, self.differentiable, strict=True)
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v, carries in pairs if carries]

    def backward_jaxpr(self, present: tuple[bool, ...]) -> Any:
        """What `backward` runs; its inputs are the residuals, then the given cotangents."""
        derivative, avals = self.derivative, self._cotangent_avals()

        def backward(residuals, given):
            return derivative.backward(residuals, _with_zeros(avals, present, given))

        given = [aval for aval, here in zip(avals, present, strict=True) if here]
        with tracing():
            return jax.make_jaxpr(backward)(list(derivative.avals), given)

    def _backward_program(self, present: tuple[bool, ...]) -> Program:
        inner = self.backward_jaxpr(present)

        def backward(arrays, key):
            return core.jaxpr_as_fun(inner)(*arrays)

        with tracing():
            jaxpr = jax.make_jaxpr(backward)(_avals(inner), KEY)
        nothing = (False,) * len(self.inputs), (frozenset(),) * len(self.inputs)
        return Program(jaxpr, (), *nothing, False, self.runtime, self.remat)

    def _batched_program(self, dims: tuple[int | None, ...], size: int) -> Program:
        dims = (*dims, None)  # one key for all
        given = [_with_batch(aval, dim, size) for aval, dim in zip(_avals(self.jaxpr), dims, strict=True)]
        with tracing():
            jaxpr = jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(self.jaxpr), dims, axis_size=size))(*given)
        return Program(jaxpr, self.inputs, self.differentiable, self.reach, self.uses_key, self.runtime, self.remat)

    def _gradient_program(self, present: tuple[bool, ...]) -> Program:
        avals, function = self._cotangent_avals(), core.jaxpr_as_fun(self.jaxpr)
        outputs = [i for i, carries in enumerate(self.differentiable) if carries]
        *primals, key = _avals(self.jaxpr)

        def gradient(args, given, key):
            def chosen_outputs(*chosen):
                results = function(*with_values(args, self.inputs, chosen), key)
                return tuple(results[i] for i in outputs)

            _, vjp = jax.vjp(chosen_outputs, *(args[i] for i in self.inputs))
            cotangents = _with_zeros(avals, present, given)
            return tuple(map(conjugate, vjp(tuple(map(conjugate, cotangents)))))

        given = [aval for aval, here in zip(avals, present, strict=True) if here]
        with tracing():
            jaxpr = jax.make_jaxpr(gradient)(primals, given, key)
        inputs = self.inputs + tuple(range(len(primals), len(primals) + len(given)))
        reach = [depends(jaxpr, i, inputs) for i in range(len(self.inputs))]
        return Program(jaxpr, inputs, tuple(map(bool, reach)), tuple(reach), self.uses_key, self.runtime, self.remat)


_OTHER_FORWARD = (
    "the forward of this program came from the disk cache, and tracing its graph again gives another one, so no backward fits "
    "its residuals. The same versions should trace the same program: please report it. `python -m pure_backend cache --clear` "
    "removes the entry"
)


def depends(jaxpr: Any, output: int, inputs: Sequence[int]) -> frozenset[int]:
    """Which of the inputs an output depends on."""
    one = with_outputs(jaxpr.jaxpr, [jaxpr.jaxpr.outvars[output]])
    _, used = dce_jaxpr(one)
    return frozenset(i for i in inputs if used[i])


def _avals(jaxpr: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.invars]


def _with_batch(aval: Any, dim: int | None, size: int) -> jax.ShapeDtypeStruct:
    shape = aval.shape if dim is None else (*aval.shape[:dim], size, *aval.shape[dim:])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _with_zeros(avals, present, given) -> list[jax.Array]:
    remaining = iter(given)
    return [next(remaining) if here else jnp.zeros(a.shape, a.dtype) for a, here in zip(avals, present, strict=True)]
