"""Grad-mode and autocast nodes of a graph that is cut into stages: every stage opens the regions that its own nodes were in.

A region lies between a node that enters a mode and the node that leaves it; the second has the first as argument. Recording of
gradients is also switched by single nodes. Both are followed along the original graph, and repeated where a stage needs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_SET_GRAD = torch._C._set_grad_enabled
_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_ENTER = (torch.amp.autocast_mode._enter_autocast, _ENTER_INFERENCE)
_EXIT = (torch.amp.autocast_mode._exit_autocast, torch.autograd.grad_mode._exit_inference_mode)


def changes_mode(node: fx.Node) -> bool:
    """Whether a node does nothing but change a mode."""
    return node.op == "call_function" and (node.target is _SET_GRAD or node.target in _ENTER or node.target in _EXIT)


class Modes:
    """The modes at the present place of the original graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.exits = {node.args[0]: node.target for node in gm.graph.nodes if node.target in _EXIT}
        self.open: list[fx.Node] = []
        self.grad: bool | None = None
        self._before: list[bool | None] = []

    def pass_over(self, node: fx.Node) -> None:
        """Go on past a mode node."""
        if node.target is _SET_GRAD:
            self.grad = bool(node.args[0])
        elif node.target in _ENTER:
            self.open.append(node)
            self._before.append(self.grad)
        elif node.args[0] in self.open:
            position = self.open.index(node.args[0])
            self.grad = self._before[position]
            del self.open[position:], self._before[position:]


class StageModes:
    """The mode nodes of one stage's graph."""

    def __init__(self, graph: fx.Graph, modes: Modes) -> None:
        self.graph = graph
        self.modes = modes
        self.open: list[tuple[fx.Node, fx.Node]] = []
        self.grad: bool | None = None

    def follow(self) -> None:
        """Bring the stage into the modes of the present place, before a node of it is copied."""
        wanted = self.modes.open
        common = 0
        while common < min(len(self.open), len(wanted)) and self.open[common][0] is wanted[common]:
            common += 1
        self.close(common)
        for enter in wanted[common:]:
            self.open.append((enter, self.graph.node_copy(enter, _no_inputs)))
        if self.grad is not self.modes.grad:
            self.grad = self.modes.grad
            self.graph.call_function(_SET_GRAD, (self.grad,))

    def close(self, down_to: int = 0) -> None:
        """Leave the regions above a depth, the innermost first."""
        while len(self.open) > down_to:
            enter, copied = self.open.pop()
            if enter in self.modes.exits:
                self.graph.call_function(self.modes.exits[enter], (copied,))


def _no_inputs(node: fx.Node) -> Any:
    raise AssertionError(f"a mode node reads {node}")
