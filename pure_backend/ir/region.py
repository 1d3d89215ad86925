"""Nodes that only make sense together, as one node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A stretch of a graph that enters and leaves functorch's levels (`torch.vmap`, `torch.func.grad`, ...).

    Between the nodes of such a stretch values are wrapped for one level, and the nodes name levels by number, so no node of it
    can be looked at alone. Called with its inputs it returns a tuple of what the rest of the graph uses of it. A function of
    the user's that Dynamo does not look into is another one: its nodes are not there yet, and it returns what it likes.
    """

    gm: Callable[..., Any]

    __name__ = "region"  # fx prints a node's target by name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.gm(*args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """A stretch that a graph has several times: called with its inputs it returns a tuple of what the graph uses of it.

    Attributes:
        gm: The stretch as a graph of values, one for all places.
    """

    gm: fx.GraphModule

    __name__ = "shared"

    def __call__(self, *args: Any) -> tuple:
        return self.gm(*args)


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """Calls of one graph, each of which is given results of the one before.

    Called with the operands of all turns, for each input of the graph one after the other (one operand, or `turns` of them
    where every turn has its own), it returns a tuple of what is used of the results.

    Attributes:
        gm: The graph that is called.
        turns: How often.
        carried: Inputs that are a result of the turn before: `(input, result)`. Their operand is for the first turn.
        own: Inputs for which each turn has an operand of its own; the others are the same in all turns.
        wanted: The results that are used: `(turn, result)`.
        stacked: Those of `own` whose operands are given as one, stacked along a new first dimension.
    """

    gm: fx.GraphModule
    turns: int
    carried: tuple[tuple[int, int], ...]
    own: tuple[int, ...]
    wanted: tuple[tuple[int, int], ...]
    stacked: frozenset[int] = frozenset()

    __name__ = "chain"

    @property
    def text(self) -> str:
        """What it does, but for the graph."""
        return f"chain:{self.turns}:{self.carried}:{self.own}:{self.wanted}:{sorted(self.stacked)}"

    def by_input(self, operands: Sequence[Any]) -> list[Any]:
        """The operands of each input, in a list where each turn has one."""
        apart = set(self.own) - self.stacked
        remaining, count = iter(operands), len(operands) - (self.turns - 1) * len(apart)
        return [[next(remaining) for _ in range(self.turns)] if i in apart else next(remaining) for i in range(count)]

    def __call__(self, *operands: Any) -> tuple:
        inputs = self.by_input(operands)
        results: list[tuple] = []
        for turn in range(self.turns):
            args = [value[turn] if i in self.own else value for i, value in enumerate(inputs)]
            for i, result in self.carried if turn else ():
                args[i] = results[-1][result]
            results.append(self.gm(*args))
        return tuple(results[turn][result] for turn, result in self.wanted)
