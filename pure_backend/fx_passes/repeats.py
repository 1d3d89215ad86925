"""Repeated stretches of a functional graph, a layer or a function that is called many times, as calls of one body.

Before: `%a = linear(%x, %w0); %b = relu(%a); %c = linear(%b, %w1); %d = relu(%c)`.
After:  `%s = body(%x, %w0); %b = s[0]; %t = body(%b, %w1); %d = t[0]`.

The body is traced once and is one function of the HLO, which XLA inlines: the same numbers, and scopes are those of each call.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pure_backend.ir.canonical import graph_key, node_text
from pure_backend.ir.facts import derive, facts, learn
from pure_backend.ir.region import Chain, Shared
from pure_backend.ir.repetition import repetitions

_SHORTEST = 8


def share_repeats(gm: fx.GraphModule) -> bool:
    """Replace repeated stretches of a functional graph by calls of one body each, in place; whether there were any."""
    nodes = list(gm.graph.nodes)
    changed = False
    for repetition in repetitions([_token(node, gm) for node in nodes], _SHORTEST):
        stretches = [nodes[start : start + repetition.length] for start in repetition.starts]
        changed |= _share(gm, stretches)
    if changed:
        gm.recompile()
    return changed


def calls_bodies(gm: fx.GraphModule) -> bool:
    """Whether repeated stretches of a functional graph were made calls of a body."""
    return any(isinstance(node.target, (Shared, Chain)) for node in gm.graph.nodes)


def _token(node: fx.Node, gm: fx.GraphModule) -> Any:
    """What equal nodes share, whichever nodes they are given; what cannot be in a body is equal to nothing."""
    inputs = (facts(arg).value for arg in node.all_input_nodes)
    if node.op in ("placeholder", "output") or any(isinstance(value, (bool, int, float)) for value in inputs):
        return node
    return node_text(node, gm)


def _share(gm: fx.GraphModule, stretches: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether the stretches, or the larger part of them, could be made calls of one body."""
    returned = sorted({offset for nodes in stretches for offset in _used_outside(nodes)})
    bodies = [_body(gm, nodes, returned) for nodes in stretches]
    keys = [graph_key(body) for body in bodies]
    common, count = Counter(keys).most_common(1)[0]
    first = keys.index(common)
    border = (*_inputs(stretches[first]), *(stretches[first][offset] for offset in returned))
    if count < 2 or not all(isinstance(facts(node).value, torch.Tensor) for node in border):
        return False
    for nodes, key in zip(stretches, keys, strict=True):
        if key == common:
            _call(gm.graph, nodes, bodies[first], returned)
    return True


def _used_outside(nodes: Sequence[fx.Node]) -> list[int]:
    inside = set(nodes)
    return [offset for offset, node in enumerate(nodes) if not inside.issuperset(node.users)]


def _inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The operands of a stretch from outside, without graphs: its body holds those itself."""
    inside = set(nodes)
    outside = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside)
    return [arg for arg in outside if arg.op != "get_attr"]


def _body(gm: fx.GraphModule, nodes: Sequence[fx.Node], returned: Sequence[int]) -> fx.GraphModule:
    """A stretch as a graph of its own, which returns the nodes at some offsets."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for i, arg in enumerate(_inputs(nodes)):
        mapping[arg] = derive(graph.placeholder(f"arg{i}"), arg)
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg not in mapping:
                mapping[arg] = graph.node_copy(arg)
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    output = graph.output(tuple(mapping[nodes[offset]] for offset in returned))
    learn(output, value=tuple(facts(nodes[offset]).value for offset in returned))
    return fx.GraphModule(gm, graph)


def _call(graph: fx.Graph, nodes: Sequence[fx.Node], body: fx.GraphModule, returned: Sequence[int]) -> None:
    """Put a call of the body in the place of a stretch."""
    results = [nodes[offset] for offset in returned]
    with graph.inserting_before(nodes[0]):
        call = graph.call_function(Shared(body), tuple(_inputs(nodes)))
        scopes = _common([facts(node).scopes for node in nodes])
        learn(call, value=tuple(facts(node).value for node in results), bodies=(body,), scopes=scopes)
        for i, node in enumerate(results):
            value = derive(graph.call_function(operator.getitem, (call, i)), node)
            node.replace_all_uses_with(value)
    for node in reversed(nodes):
        graph.erase_node(node)


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest path that all begin with."""
    shortest, longest = min(paths), max(paths)
    end = next((i for i, name in enumerate(shortest) if longest[i : i + 1] != (name,)), len(shortest))
    return shortest[:end]
