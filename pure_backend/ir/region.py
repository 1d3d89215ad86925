"""Nodes that only make sense together, as one node."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A stretch of a graph that enters and leaves functorch's levels (`torch.vmap`, `torch.func.grad`, ...).

    Between the nodes of such a stretch values are wrapped for one level, and the nodes name levels by number, so no node of it
    can be looked at alone. Called with its inputs it returns a tuple of what the rest of the graph uses of it.
    """

    gm: fx.GraphModule

    __name__ = "region"  # fx prints a node's target by name

    def __call__(self, *args: Any) -> tuple:
        return self.gm(*args)


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
