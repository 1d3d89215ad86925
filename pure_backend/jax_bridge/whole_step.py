"""A training step as one program: the loss, its gradients over all micro-batches, and the update, in one jaxpr.

step(*inputs of the loss, hyperparameters, *states, key) -> (*results, *new values of inputs, *new states[, finite])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.extend import core
from torch import fx

from pure_backend import _compat, counters
from pure_backend.ir.canonical import graph_key
from pure_backend.ir.facts import facts
from pure_backend.ir.layout import Layout
from pure_backend.ir.positions import with_values
from pure_backend.jax_bridge.avals import to_aval
from pure_backend.jax_bridge.compile import programs, settings
from pure_backend.jax_bridge.conjugation import conjugate
from pure_backend.jax_bridge.mesh import constrained
from pure_backend.jax_bridge.program import Program
from pure_backend.jax_bridge.rng import KEY, fold_data
from pure_backend.jax_bridge.runtimes import Place, place_of, runtime_for
from pure_backend.jax_bridge.trace import trace, tracing
from pure_backend.jax_bridge.vjp import rematerialized

_OF_THE_UPDATE = 2**31 - 1  # a random optimizer draws other numbers than the model


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How the graphs of the loss and of the update meet. Inputs are counted among a graph's tensors.

    Attributes:
        loss: Which result of the loss's graph is the loss.
        returned: The results that the caller gets.
        written: For each input that the loss writes: the input, and the result that is its new value.
        trained: The inputs of the loss that the gradient is taken of.
        batch: The inputs that are split into micro-batches along their first dimension.
        micro_batches: How many.
        update_inputs: What each input of the update is: a kind ("parameter", "gradient", "hyperparameter", "state") and which,
            counting `trained`, the hyper-parameters, or the states.
        update_results: What the results of the update are: a kind ("parameter", "state", "made") and which.
        exact: The states that the update computes in f64 whatever they are kept in, as eager does with step counters.
        check_finite: Whether the last result says that loss and gradients are finite.
    """

    loss: int
    returned: tuple[int, ...]
    written: tuple[tuple[int, int], ...]
    trained: tuple[int, ...]
    batch: tuple[int, ...]
    micro_batches: int
    update_inputs: tuple[tuple[str, int], ...]
    update_results: tuple[tuple[str, int], ...]
    exact: frozenset[int]
    check_finite: bool

    @property
    def new_values(self) -> tuple[int, ...]:
        """The inputs of the loss that have a new value after the step, in the order of the results."""
        updated = [self.trained[i] for kind, i in self.update_results if kind == "parameter"]
        return (*updated, *(i for i, _ in self.written if i not in updated))

    @property
    def new_states(self) -> tuple[int, ...]:
        """The states that have a new value after the step."""
        return tuple(i for kind, i in self.update_results if kind == "state")

    @property
    def made(self) -> tuple[int, ...]:
        """The states that first come to be in the step."""
        return tuple(i for kind, i in self.update_results if kind == "made")


def step_program(
    loss: fx.GraphModule,
    update: fx.GraphModule,
    states: Sequence[torch.Tensor],
    wiring: Wiring,
    device: Place,
    remat: Any,
    layouts: tuple[Layout | None, ...] = (),
) -> Program:
    """The program of a step, found by content or traced.

    Args:
        loss: Functional graph of the loss of one micro-batch.
        update: Functional graph of the optimizer's step.
        states: What the optimizer keeps, and other tensors that its graph reads.
        wiring: How they meet.
        device: The device that it will run on.
        remat: See `Options.remat`.
        layouts: On a mesh, how each new value of an input or state lies.
    """
    _compat.torchax()
    with _compat.x64():
        kept = tuple(to_aval(state) for state in states)
    described = tuple((aval.shape, str(aval.dtype)) for aval in kept)
    key = ("step", graph_key(loss), graph_key(update), described, wiring, place_of(device), remat, layouts, settings())

    def make() -> Program:
        with counters.timed("trace"), _compat.x64():
            loss_jaxpr, loss_draws, inputs = _traced(loss)
            update_jaxpr, update_draws, _ = _traced(update)
        with counters.timed("differentiate"):
            jaxpr = _whole(loss_jaxpr, update_jaxpr, inputs, kept, wiring, remat, layouts)
        results = len(jaxpr.jaxpr.outvars)
        nothing = (frozenset(),) * results
        draws = loss_draws or update_draws
        return Program(jaxpr, (), (False,) * results, nothing, draws, runtime_for(device), remat)

    return programs.get(key, make)


def _traced(gm: fx.GraphModule) -> tuple[Any, bool, list[jax.ShapeDtypeStruct]]:
    counters.count("traces")
    avals = [to_aval(facts(node).value) for node in gm.graph.find_nodes(op="placeholder", sort=True)]
    return *trace(gm, avals), avals


def _whole(
    loss: Any, update: Any, inputs: Sequence[Any], states: Sequence[Any], wiring: Wiring, remat: Any, layouts: Any
) -> Any:
    """The jaxpr of the step."""
    step = _Step(core.jaxpr_as_fun(loss), core.jaxpr_as_fun(update), wiring, remat, layouts)
    count = sum(kind == "hyperparameter" for kind, _ in wiring.update_inputs)
    with tracing():
        batch = [_times(a, wiring.micro_batches) if i in wiring.batch else a for i, a in enumerate(inputs)]
        hyper = jax.ShapeDtypeStruct((max(count, 1),), jnp.float64)
        return jax.make_jaxpr(step)(batch, hyper, list(states), KEY)


def _times(aval: jax.ShapeDtypeStruct, n: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((aval.shape[0] * n, *aval.shape[1:]), aval.dtype)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The step as a JAX function."""

    loss: Any
    update: Any
    wiring: Wiring
    remat: Any
    layouts: tuple[Layout | None, ...]

    def __call__(self, inputs: list, hyper: jax.Array, states: list, key: jax.Array) -> tuple:
        wiring = self.wiring
        one = self.accumulated if wiring.micro_batches > 1 else self.gradients
        # The loss of a micro-batch counts 1/n, as in a mean over the whole batch.
        inputs, loss, returned, grads = one(list(inputs), 1 / wiring.micro_batches, key)
        new = self.updated(inputs, grads, hyper, states, fold_data(key, _OF_THE_UPDATE))
        for (kind, i), value in zip(wiring.update_results, new, strict=True):
            if kind == "parameter":
                inputs[wiring.trained[i]] = value.astype(inputs[wiring.trained[i]].dtype)
        kept = [v.astype(states[i].dtype) for (k, i), v in zip(wiring.update_results, new, strict=True) if k == "state"]
        made = [value for (kind, _), value in zip(wiring.update_results, new, strict=True) if kind == "made"]
        finite = [_all_finite([loss, *grads])] if wiring.check_finite else []
        new_values = [*(inputs[i] for i in wiring.new_values), *kept]
        if self.layouts:
            new_values = [constrained(v, layout) for v, layout in zip(new_values, self.layouts, strict=True)]
        return (*returned, *new_values, *made, *finite)

    def gradients(self, inputs: list, scale: float, key: jax.Array) -> tuple[list, jax.Array, list, list]:
        """What one micro-batch gives: inputs with their new values, the loss, the results to return, gradients."""
        wiring = self.wiring

        def differentiated(chosen):
            results = self.loss(*with_values(inputs, wiring.trained, chosen), key)
            return results[wiring.loss] * jnp.asarray(scale, results[wiring.loss].dtype), results

        chosen = [inputs[i] for i in wiring.trained]
        grad = jax.value_and_grad(rematerialized(differentiated, self.remat), has_aux=True)
        (loss, results), grads = grad(chosen)
        inputs = list(inputs)
        for i, result in wiring.written:
            inputs[i] = results[result]
        returned = [loss if i == wiring.loss else results[i] for i in wiring.returned]
        return inputs, loss, returned, [conjugate(g) for g in grads]  # torch's gradient is the conjugate of JAX's

    def accumulated(self, inputs: list, scale: float, key: jax.Array) -> tuple[list, jax.Array, list, list]:
        """The same over all micro-batches, in a loop: gradients and losses are added, other results stacked."""
        wiring, n = self.wiring, self.wiring.micro_batches

        def body(carry, at):
            written, total, sums = carry
            index, micro = at
            full = with_values(inputs, [*wiring.batch, *(i for i, _ in wiring.written)], [*micro, *written])
            full, loss, returned, grads = self.gradients(full, scale, fold_data(key, index))
            sums = [a + b for a, b in zip(sums, grads, strict=True)]
            return ([full[i] for i, _ in wiring.written], total + loss, sums), returned

        micros = [inputs[i].reshape(n, -1, *inputs[i].shape[1:]) for i in wiring.batch]
        # The carry of the loop: what the loss writes (running statistics), the sum of losses, the sums of gradients.
        zero = jax.eval_shape(lambda: self.loss(*self.first(inputs), key)[wiring.loss])
        start = ([inputs[i] for i, _ in wiring.written], jnp.zeros((), zero.dtype), self.zeros(inputs))
        (written, total, grads), stacked = lax.scan(body, start, (jnp.arange(n, dtype=jnp.uint32), micros))
        inputs = list(inputs)
        for (i, _), value in zip(wiring.written, written, strict=True):
            inputs[i] = value
        returned = [total if i == wiring.loss else s for i, s in zip(wiring.returned, stacked, strict=True)]
        return inputs, total, returned, grads

    def first(self, inputs: list) -> list:
        """The inputs with the first micro-batch."""
        n, batch = self.wiring.micro_batches, self.wiring.batch
        return [value[: value.shape[0] // n] if i in batch else value for i, value in enumerate(inputs)]

    def zeros(self, inputs: list) -> list:
        return [jnp.zeros(inputs[i].shape, inputs[i].dtype) for i in self.wiring.trained]

    def updated(self, inputs: list, grads: list, hyper: jax.Array, states: list, key: jax.Array) -> Sequence[jax.Array]:
        """The results of the update."""
        wiring = self.wiring
        found = {
            "parameter": lambda i: inputs[wiring.trained[i]],
            "gradient": lambda i: grads[i],
            "hyperparameter": lambda i: hyper[i],
            "state": lambda i: states[i].astype(jnp.float64) if i in wiring.exact else states[i],
        }
        return self.update(*(found[kind](i) for kind, i in wiring.update_inputs), key)


def _all_finite(values: Sequence[jax.Array]) -> jax.Array:
    finite = [jnp.isfinite(value).all() for value in values]
    return jnp.stack(finite).all()
