"""Which inputs of a graph are donated: their memory may be reused by its program, so they are invalid after the call.

A user donates with `jax_op(..., donate_argnames=...)` or, as for torch_xla's `openxla` backend, with
`torch.ops.xla.dynamo_set_buffer_donor_(x, True)` on an input `x`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

donated_arguments: dict[str, tuple[int, ...]] = {}
"""Positions of the donated arguments of operators, by the operators' names."""

_MARKER = "xla::dynamo_set_buffer_donor_"


def take_markers(gm: fx.GraphModule) -> None:
    """Remove the marking nodes; the inputs that they name note it in their meta."""
    for node in list(gm.graph.nodes):
        if not (isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and _name(node.target) == _MARKER):
            continue
        marked, donated = node.args
        if marked.op == "placeholder":
            marked.meta["donated"] = donated
        node.replace_all_uses_with(marked)
        gm.graph.erase_node(node)


def donors(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The placeholders of a graph that are donated."""
    found = {node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("donated")}
    if donated_arguments:
        for node in gm.graph.nodes:
            positions = donated_arguments.get(_name(node.target)) if isinstance(node.target, torch._ops.OpOverload) else None
            args = [node.args[i] for i in positions or () if i < len(node.args)]
            found |= {arg for arg in args if isinstance(arg, fx.Node) and arg.op == "placeholder"}
    return frozenset(found)


def _name(target: Any) -> str:
    return target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else target._schema.name
