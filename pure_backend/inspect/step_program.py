"""The JAX program of a training step, captured and not run."""

from __future__ import annotations

from typing import Any

from pure_backend.inspect.torch_program import NamedProgram, Owner, output_names, owner_of
from pure_backend.transforms.optimizer_graph import Entry
from pure_backend.transforms.train_step import TrainStep


def capture_step(step: TrainStep, args: tuple, kwargs: dict[str, Any]) -> NamedProgram:
    """The program of one step on such a batch: parameters, buffers and states are donated, as they are in a loop.

    Args:
        step: The step; model and optimizer stay as they are.
        args: A batch.
        kwargs: Its keywords.
    """
    plan, given = step.planned(*args, **kwargs)
    given, _, update, program, wiring = plan.ready(given)
    tensors = plan.tensors(given)
    owners = [owner_of(tensor, step.model, name) for tensor, name in zip(tensors, plan.names(update), strict=False)]
    states = [_state(slot, [owners[i] for i in wiring.trained]) for slot in update.graph.states]
    owners = [*owners, Owner("other", "hyper-parameters", ()), *states, Owner("other", "key", ())]
    new = [*wiring.new_values, *(len(tensors) + 1 + i for i in wiring.new_states)]
    written = {place: len(wiring.returned) + i for i, place in enumerate(new)}
    names = [owner.label for owner in owners]
    outputs = output_names(len(program.forward_jaxpr.jaxpr.outvars), written, names)
    return NamedProgram(program.forward_jaxpr, tuple(names), outputs, (), written, tuple(owners))


def _state(slot: Any, trained: list[Owner]) -> Owner:
    if type(slot) is not Entry:
        return Owner("other", "a state", ())
    parameter = trained[slot.parameter]
    return Owner("state", parameter.name, parameter.shape, f"{slot.name} of {parameter.name}")
