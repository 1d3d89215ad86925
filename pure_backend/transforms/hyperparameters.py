"""What an optimizer's groups say: numbers that may change from step to step, and all else, which the step is compiled for."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from pure_backend.ir.exact import exact

_NOT_READ = ("params", "param_names")


class Place(NamedTuple):
    """Where a hyper-parameter is kept: `param_groups[group][key]`, or an element of the tuple there."""

    group: int
    key: str
    element: int | None

    def source(self, optimizer: str) -> str:
        """What Dynamo calls a graph's input that was read there."""
        element = "" if self.element is None else f"[{self.element}]"
        return re.sub(r"[^a-zA-Z0-9]+", "_", f"{optimizer}.param_groups[{self.group}]['{self.key}']{element}")


class Settings(NamedTuple):
    """The hyper-parameters of an optimizer.

    Attributes:
        fixed: Flags, names and ints by place, and where tensors lie.
        numbers: The floats by place.
    """

    fixed: dict[Place, Any]
    numbers: dict[Place, float]


def read_settings(optimizer: Optimizer) -> Settings:
    """The present hyper-parameters."""
    found = Settings({}, {})
    for group, values in enumerate(optimizer.param_groups):
        for key, value in values.items():
            if key in _NOT_READ:
                continue
            elements: Sequence[Any] = value if isinstance(value, (tuple, list)) else ()
            for element, number in enumerate(elements):
                _note(found, Place(group, key, element), number)
            if not elements:
                _note(found, Place(group, key, None), value)
    return found


def _key(value: Any) -> Any:
    """What a setting is compared by: a flag is no 1."""
    return exact(value) if isinstance(value, Hashable) else value


def _note(found: Settings, place: Place, value: Any) -> None:
    if type(value) is float:
        found.numbers[place] = value
    else:
        found.fixed[place] = torch.Tensor if isinstance(value, torch.Tensor) else _key(value)
