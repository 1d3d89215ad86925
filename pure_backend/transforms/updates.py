"""Which captured step of an optimizer its present state and hyper-parameters call for, and the tensors that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pure_backend.transforms.hyperparameters import Place, Settings, read_settings
from pure_backend.transforms.optimizer_graph import Entry, OptimizerGraph, Slot, capture_optimizer

_LIMIT = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What one step needs of the optimizer.

    Attributes:
        graph: The captured step.
        states: The tensors of `graph.states`.
        numbers: The values of `graph.numbers`.
        initial: Those of the states that the optimizer does not have yet; it gets them after the step.
    """

    graph: OptimizerGraph
    states: list[torch.Tensor]
    numbers: list[float]
    initial: Mapping[Entry, torch.Tensor]


class Updates:
    """The captured steps of an optimizer over certain parameters.

    Args:
        optimizer: The optimizer.
        max_norm: As for `torch.nn.utils.clip_grad_norm_`, or None.
    """

    def __init__(self, optimizer: Optimizer, max_norm: float | None) -> None:
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.known: list[tuple[dict[Place, Any], Any, OptimizerGraph]] = []
        self.latest: tuple[Settings, Any, OptimizerGraph] | None = None

    def find(self, trained: Sequence[torch.Tensor], which: tuple[int, ...]) -> Update:
        """The step for the present state; captured if it is a new one.

        Args:
            trained: The parameters that get a gradient.
            which: Their places among all parameters.
        """
        settings = read_settings(self.optimizer)
        over = which, tuple(len(group["params"]) for group in self.optimizer.param_groups)
        for graph in self.fitting(settings, over):
            if (update := self.read(graph, settings, trained, {})) is not None:
                self.latest = (settings, over, graph)
                return update
        graph, initial = capture_optimizer(self.optimizer, trained, self.max_norm)
        self.known = [(settings.fixed, over, graph), *self.known[: _LIMIT - 1]]
        update = self.read(graph, settings, trained, initial)
        assert update is not None, "a captured step does not fit the state that it was captured from"
        return update

    def fitting(self, settings: Settings, over: Any) -> list[OptimizerGraph]:
        """The steps that were captured over these parameters for such hyper-parameters."""
        if self.latest is not None and self.latest[:2] == (settings, over):
            return [self.latest[2]]
        alike = [graph for fixed, known, graph in self.known if fixed == settings.fixed and known == over]
        return [graph for graph in alike if graph.accepts(settings.numbers)]

    def read(
        self, graph: OptimizerGraph, settings: Settings, trained: Sequence[torch.Tensor], initial: Mapping[Entry, torch.Tensor]
    ) -> Update | None:
        """What a step needs, or None if it is not one for the present state."""
        kept = [self.optimizer.state.get(parameter, {}) for parameter in trained]
        if any(kept[entry.parameter].get(entry.name) is not None for entry in graph.made):
            return None
        states, new = [], {}
        for slot in graph.states:
            value = self.value(slot, kept, initial)
            if value is None:
                return None
            device = trained[slot.parameter if type(slot) is Entry else 0].device
            if value.device != device:  # a counter that eager keeps on the CPU: reading it there would sync every step
                value = value.to(device)
            if type(slot) is Entry and value is not kept[slot.parameter].get(slot.name):
                new[slot] = value
            states.append(value)
        return Update(graph, states, [settings.numbers[place] for place in graph.numbers], {**initial, **new})

    def value(self, slot: Slot, kept: Sequence[Mapping[str, Any]], initial: Mapping[Entry, torch.Tensor]) -> Any:
        """What lies in a place now."""
        if type(slot) is Entry:
            known = kept[slot.parameter].get(slot.name)
            return initial.get(slot) if known is None else known
        if type(slot) is Place:
            found = self.optimizer.param_groups[slot.group][slot.key]
            return found if slot.element is None else found[slot.element]
        return slot
