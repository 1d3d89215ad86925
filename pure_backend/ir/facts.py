"""What is known of a node, kept in its `meta`: the only module that writes there, and the only one that knows the key."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from pure_backend.ir.geometry import Geometry

_KEY = "facts"
_DYNAMOS = ("stack_trace", "nn_module_stack")  # what Dynamo notes of a node's place in the user's program


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the passes learned of one node.

    The first four hold for every call of a graph and are known when it is normalized; propagation adds the others for each
    signature. A copy of a node (`graph.node_copy`) has the facts of the original.

    Attributes:
        origin: The name that the node, or the one it was made from, has in the normalized graph.
        scopes: The modules and profiler scopes that it was called in, outermost first.
        donated: Whether the caller gives up the memory of this input.
        keeps_scalar: Whether the number that this `item()` gives stays in the program, see `keep_scalars`.
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

    origin: str = ""
    scopes: tuple[str, ...] = ()
    donated: bool = False
    keeps_scalar: bool = False
    value: Any = None
    geometry: Geometry | None = None
    writes: tuple[fx.Node, ...] = ()
    recorded: tuple[fx.Node, ...] = ()
    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    restrided: tuple[tuple[fx.Node, Geometry], ...] = ()
    cut: tuple[fx.Node, ...] = ()
    bodies: tuple[fx.GraphModule, ...] = ()


_NOTHING = Facts()


def facts(node: fx.Node) -> Facts:
    """The facts of a node."""
    return node.meta.get(_KEY, _NOTHING)


def learn(node: fx.Node, **known: Any) -> None:
    """Replace some of a node's facts; with a new `value` and nothing else said, its geometry is the present one."""
    if "value" in known and "geometry" not in known:
        value = known["value"]
        known["geometry"] = Geometry.of(value) if isinstance(value, torch.Tensor) else None
    node.meta[_KEY] = dataclasses.replace(facts(node), **known)


def derive(node: fx.Node, source: fx.Node, **known: Any) -> fx.Node:
    """Let a new node stand where another one stood: at its place in the user's program, in its scopes and modes.

    Args:
        node: The new node.
        source: The other one. What it alone did (its writes and bodies) is not the new node's.
        known: Facts that differ, as in `learn`; without a `value` it is the source's.
    """
    node.meta.update({key: source.meta[key] for key in _DYNAMOS if key in source.meta})
    node.meta[_KEY] = dataclasses.replace(facts(source), donated=False, writes=(), recorded=(), restrided=(), cut=(), bodies=())
    learn(node, **known)
    return node


def origin(node: fx.Node) -> str:
    """The name that a node, or the one it was made from, has in the normalized graph, which can be cut at it."""
    return facts(node).origin or node.name


def reads_input_scalar(node: fx.Node) -> bool:
    """Whether a node is `item()` of a float input: how Dynamo spells a Python float argument that may change.

    Its value stays a runtime input of the program, so a new learning rate or temperature compiles nothing. In a graph that
    hands no scalar to its caller every `item()` may be one (`keep_scalars`).
    """
    if node.op != "call_method" or node.target != "item":
        return False
    if facts(node).keeps_scalar:
        return True
    if node.args[0].op != "placeholder":
        return False
    value = facts(node.args[0]).value
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def keep_scalars(gm: fx.GraphModule) -> None:
    """Let every `item()` of a graph stay in its program: for graphs whose scalars meet tensors again and decide nothing."""
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        learn(node, keeps_scalar=True)
