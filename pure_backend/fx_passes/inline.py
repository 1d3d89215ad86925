"""A checkpointed region with an impure node inside: its nodes take its place, so that only the impure one leaves the program.

Left as one node the whole region would run in eager, and torch's own checkpoint does not know every device. What is lost is the
recomputation: the values of this region are kept for the backward like those around it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pure_backend.ir.facts import origin
from pure_backend.ir.impurity import Impurity


def inline_checkpoints(gm: fx.GraphModule, impurities: Sequence[Impurity]) -> bool:
    """Replace the impure checkpoint operators of a graph by their bodies, in place.

    Returns:
        Whether there were any.
    """
    names = {impurity.node for impurity in impurities}
    found = [node for node in gm.graph.nodes if _is_checkpoint(node) and origin(node) in names]
    found = [node for node in found if all(user.target is operator.getitem for user in node.users)]
    for node in found:
        _inline(gm, node)
    return bool(found)


def _is_checkpoint(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "tag_activation_checkpoint"


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    body = getattr(gm, node.args[0].target)
    env: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder", sort=True), node.args[1:], strict=True))
    results: Any = ()
    with gm.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "output":
                results = fx.map_arg(inner.args[0], env.__getitem__)
            elif inner.op != "placeholder":
                env[inner] = gm.graph.node_copy(inner, env.__getitem__)
                if inner.op == "get_attr":
                    env[inner].target = _attach(gm, node, inner, getattr(body, inner.target))
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)


def _attach(gm: fx.GraphModule, owner: fx.Node, node: fx.Node, value: Any) -> str:
    """Make an attribute of the body one of the graph, under a name of its own."""
    name = f"{owner.name}_{node.target}"
    setattr(gm, name, value)
    return name
