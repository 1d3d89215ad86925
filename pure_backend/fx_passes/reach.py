"""Which inputs get a gradient from which output: read off the autograd graph of the propagated fake tensors.

Eager leaves `None` where no path of recorded operators leads to an input, and an optimizer then leaves the parameter alone;
zeros would let weight decay move it (pytorch issue 131794).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Reach = Callable[[torch.Tensor], frozenset[int]]
"""The positions of the arguments that a tensor's gradient reaches."""


def gradient_reach(args: Sequence[Any]) -> Reach:
    """Remember where the autograd graph ends, before the graph runs.

    Args:
        args: The fake arguments.

    Returns:
        A function that gives, for a tensor that a graph computed from them, the positions of the arguments that its gradient
        reaches.
    """
    sources: dict[Any, frozenset[int]] = {}
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor) and arg.requires_grad:
            for tensor in (arg, arg._base):  # a write to a view moves its history to its base
                if tensor is not None and tensor.requires_grad:
                    edge = _edge(tensor)
                    sources[edge] = sources.get(edge, frozenset()) | {position}
    reached: dict[Any, frozenset[int]] = {}

    def reach(tensor: torch.Tensor) -> frozenset[int]:
        return _search(_edge(tensor), sources, reached) if tensor.requires_grad else frozenset()

    return reach


def _edge(tensor: torch.Tensor) -> Any:
    """The autograd node where a tensor's gradient goes first, and the tensor's output index there."""
    with torch.inference_mode(False):
        edge = torch.autograd.graph.get_gradient_edge(tensor)
    return (edge.node, edge.output_nr)


def _search(start: Any, sources: dict[Any, frozenset[int]], reached: dict[Any, frozenset[int]]) -> frozenset[int]:
    """Positions below an edge; iterative, since a deep model's autograd graph is deeper than Python's stack."""
    stack = [start]
    while stack:
        edge = stack[-1]
        if edge in reached:
            stack.pop()
            continue
        if edge in sources:
            reached[edge] = sources[edge]
            continue
        below = [following for following in edge[0].next_functions if following[0] is not None]
        waiting = [following for following in below if following not in reached]
        if waiting:
            stack.extend(waiting)
            continue
        reached[edge] = frozenset().union(*(reached[following] for following in below))
    return reached[start]
