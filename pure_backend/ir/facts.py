"""What is known of a node's value, kept in `node.meta["facts"]`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from pure_backend.ir.geometry import Geometry


@dataclasses.dataclass(frozen=True)
class Facts:
    """What propagation learned of one node.

    Attributes:
        value: The node's value: fake tensors, or a plain Python value where no tensor is involved. A fake tensor shows the
            state at the end of the graph; what it was when the node ran is in `geometry`.
        geometry: The value's geometry right after the node ran; None unless the value is one tensor.
        writes: The argument nodes whose memory the node wrote.
        recorded: Those of them whose gradient history the write changed.
        grad: Whether autograd was recording while it ran.
        autocast: Device type and dtype of the autocast regions that were open while it ran.
        restrided: Argument nodes that the node gave another geometry in place (`t_`, `unsqueeze_`), and the new one.
        cut: Argument nodes whose gradient history the node ended in place (`detach_`).
        bodies: For a higher-order operator, its propagated bodies.
    """

    value: Any
    geometry: Geometry | None = None
    writes: tuple[fx.Node, ...] = ()
    recorded: tuple[fx.Node, ...] = ()
    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    restrided: tuple[tuple[fx.Node, Geometry], ...] = ()
    cut: tuple[fx.Node, ...] = ()
    bodies: tuple[fx.GraphModule, ...] = ()

    @classmethod
    def of(cls, value: Any, **known: Any) -> Facts:
        """Facts of a value whose geometry is its present one."""
        return cls(value, Geometry.of(value) if isinstance(value, torch.Tensor) else None, **known)


def facts(node: fx.Node) -> Facts:
    """The facts of a node of a propagated graph."""
    return node.meta["facts"]


def reads_input_scalar(node: fx.Node) -> bool:
    """Whether a node is `item()` of a float input: how Dynamo spells a Python float argument that may change.

    Its value stays a runtime input of the program, so a new learning rate or temperature compiles nothing. In a graph that
    hands no scalar to its caller every `item()` may be one (`keep_scalars`).
    """
    if node.op != "call_method" or node.target != "item":
        return False
    if node.meta.get("scalar in program"):
        return True
    if node.args[0].op != "placeholder":
        return False
    value = facts(node.args[0]).value
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def keep_scalars(gm: fx.GraphModule) -> None:
    """Let every `item()` of a graph stay in its program: for graphs whose scalars meet tensors again and decide nothing."""
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        node.meta["scalar in program"] = True
