"""A private copy of Dynamo's graph whose tensor attributes are arguments."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from pure_backend.ir.facts import learn


@dataclasses.dataclass(frozen=True)
class Normalized:
    """A graph that may be edited, and where its extra arguments come from.

    Attributes:
        gm: The copy. Its first placeholders are the original ones, then one for each lifted attribute.
        lifted: For each extra placeholder, the module that owns the attribute and the attribute's name; read at every call,
            so that a buffer that was replaced is seen.
    """

    gm: fx.GraphModule
    lifted: tuple[tuple[Any, str], ...]

    def read_lifted(self) -> tuple[torch.Tensor, ...]:
        """The present values of the lifted attributes."""
        return tuple(getattr(owner, name) for owner, name in self.lifted)


def lift_attributes(gm: fx.GraphModule) -> Normalized:
    """Copy a graph and turn its tensor attributes into arguments.

    Before: `%c = get_attr[target=_tensor_constant0]`; after: `%c = placeholder[target=_tensor_constant0]`. A constant baked
    into a program would be copied into every executable and would miss later changes of a buffer.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    lifted: dict[str, fx.Node] = {}
    owners: list[tuple[Any, str]] = []
    for node in gm.graph.find_nodes(op="placeholder", sort=True):
        mapping[node] = graph.node_copy(node)
        mapping[node].meta.pop("grapharg", None)  # Dynamo's weak reference to the argument of the first call
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr" and isinstance(attrgetter(node.target)(gm), torch.Tensor):
            if node.target not in lifted:
                lifted[node.target] = graph.placeholder(node.target.replace(".", "_"))
                owners.append(_owner(gm, node.target))
            mapping[node] = lifted[node.target]
            continue
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    _placeholders_first(graph)
    for node in graph.nodes:
        learn(node, origin="")  # that of a stage's node is in the graph that was cut
    return Normalized(fx.GraphModule(gm, graph), tuple(owners))


def _owner(gm: fx.GraphModule, target: str) -> tuple[Any, str]:
    path, _, name = target.rpartition(".")
    return (attrgetter(path)(gm) if path else gm), name


def _placeholders_first(graph: fx.Graph) -> None:
    """Move lifted placeholders up behind the original ones, keeping their order."""
    nodes = list(graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    first = next(node for node in nodes if node.op != "placeholder")
    for node in placeholders:
        first.prepend(node)
