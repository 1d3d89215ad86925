"""What the `mutation` pass gives: a graph of values, and how its results become the original graph's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.fx_passes.replay import View
from pure_backend.ir.geometry import Placed


@dataclasses.dataclass(frozen=True)
class Value:
    """An output leaf that the program computes: its position among the program's outputs."""

    index: int


@dataclasses.dataclass(frozen=True)
class Constant:
    """An output leaf that is no tensor."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Alias:
    """An output leaf that shares memory in eager: a view of an input, or of another output of the program.

    Attributes:
        of_input: The argument's position, or None.
        of_output: The program output's position, or None.
        view: How to make the leaf from it.
    """

    of_input: int | None
    of_output: int | None
    view: View


@dataclasses.dataclass(frozen=True)
class WriteBack:
    """A program output that is the new value of an input.

    Attributes:
        input: The argument's position.
        index: The position among the program's outputs.
        recorded: Whether autograd records the write, so that the input gets a gradient history.
        storage: Whether the value is the whole storage, flat, instead of the input as it is.
    """

    input: int
    index: int
    recorded: bool
    storage: bool


Source = int | tuple[int, ...]
"""The argument that an input is, or the arguments that it is the stack of."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the inputs of a functional graph are among the *arguments*: what the original graph takes, counted from 0.

    Attributes:
        sources: For each input, in order, the argument or arguments.
    """

    sources: tuple[Source, ...]

    @functools.cached_property
    def position(self) -> dict[int, int]:
        """The input that each argument is, or is part of."""
        parts = ((i, (source,) if isinstance(source, int) else source) for i, source in enumerate(self.sources))
        return {argument: i for i, arguments in parts for argument in arguments}

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """For each input its argument, or the first of them."""
        return tuple(source if isinstance(source, int) else source[0] for source in self.sources)

    @functools.cached_property
    def stacks(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The inputs that are stacks, and of which arguments."""
        return tuple((i, source) for i, source in enumerate(self.sources) if not isinstance(source, int))

    def of(self, arguments: Iterable[int]) -> frozenset[int]:
        """The inputs that these arguments are."""
        return frozenset(self.position[argument] for argument in arguments)

    def gather(self, args: Sequence[Any], grad: bool) -> list[Any]:
        """The inputs of a call; `grad` says whether autograd records how they are stacked."""
        inputs = [args[i] for i in self.firsts]
        if self.stacks:
            with torch.set_grad_enabled(grad):
                for i, arguments in self.stacks:
                    inputs[i] = torch.stack([args[argument] for argument in arguments])
        return inputs


@dataclasses.dataclass(frozen=True)
class Functional:
    """A graph of values and how its results become the original graph's results.

    Attributes:
        gm: The graph; its output is one flat tuple of tensors.
        inputs: What its placeholders are. All else counts arguments.
        differentiable: Which of those tensors carry a gradient.
        outputs: A leaf for each leaf of the original output.
        out_spec: The pytree of the original output.
        write_backs: The inputs that are written.
        storage_inputs: Inputs that the program takes as one flat tensor over their storage, because written inputs overlap:
            the position of the first input on each such storage, how many elements of the program's input lie before it, and
            how many there are.
        placed: The inputs whose place in memory decides what the graph computes.
    """

    gm: fx.GraphModule
    inputs: Inputs
    differentiable: tuple[bool, ...]
    outputs: tuple[Value | Constant | Alias, ...]
    out_spec: pytree.TreeSpec
    write_backs: tuple[WriteBack, ...]
    storage_inputs: dict[int, tuple[int, int]]
    placed: Placed
