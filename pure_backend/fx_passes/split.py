"""A graph of results and gradients -> forward and backward, as the two bodies of an `autograd.Function`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx


@dataclasses.dataclass(frozen=True)
class Split:
    """The bodies of `torch.ops.higher_order.autograd_function_apply`.

    Attributes:
        forward: `(*operands) -> (results, saved)`.
        backward: `(*cotangents, *saved) -> gradients of the operands`.
        constants: Tensors that the graph held; they are the last operands.
        carries: For each result whether it carries a gradient.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    constants: tuple[torch.Tensor, ...]
    carries: tuple[bool, ...]


def split(gm: fx.GraphModule, count: int, carries: Sequence[bool], owners: Sequence[int]) -> Split:
    """Cut a joint graph: what the results need is forward, the rest backward, and what crosses is saved, as in eager.

    Args:
        gm: `(*operands, *cotangents of the results that carry a gradient) -> (*results, *gradients)`.
        count: How many operands it takes.
        carries: For each result whether it carries a gradient.
        owners: For each gradient the operand that it belongs to; there may be operands that the graph does not take.
    """
    placeholders = gm.graph.find_nodes(op="placeholder", sort=True)
    constants = gm.graph.find_nodes(op="get_attr", sort=True)
    leaves: Any = gm.graph.output_node().args[0]
    results, grads = leaves[: len(carries)], leaves[len(carries) :]
    first = _forward_nodes(gm, results)
    given = {*placeholders[:count], *constants, *first}
    second = [node for node in _ancestors(gm, grads) if node not in given and node.op == "call_function"]
    read = [arg for node in second for arg in node.all_input_nodes] + [grad for grad in grads if grad is not None]
    saved = list(dict.fromkeys(node for node in read if node in given))
    carried = max([count, *(owner + 1 for owner in owners)])
    operands = [*placeholders[:count], *[None] * (carried - count), *constants]
    cotangents = iter(placeholders[count:])
    forward = _graph(operands, [node for node in gm.graph.nodes if node in first], lambda env: (env(results), env(saved)))
    by_owner = dict(zip(owners, grads, strict=True))
    backward = _graph(
        [*(next(cotangents) if carry else None for carry in carries), *saved],
        second,
        lambda env: env([by_owner.get(i) for i in range(len(operands))]),
    )
    return Split(forward, backward, tuple(getattr(gm, node.target) for node in constants), tuple(carries))


def _forward_nodes(gm: fx.GraphModule, results: Iterable[Any]) -> set[fx.Node]:
    """What the results need, and every part of a tuple among it."""
    needed = {node for node in _ancestors(gm, results) if node.op == "call_function"}
    return needed | {user for node in needed for user in node.users if user.target is operator.getitem}


def _ancestors(gm: fx.GraphModule, nodes: Iterable[Any]) -> list[fx.Node]:
    """Nodes and all that they need, in graph order."""
    wanted = {node for node in nodes if isinstance(node, fx.Node)}
    for node in reversed(gm.graph.nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return [node for node in gm.graph.nodes if node in wanted]


def _graph(inputs: Sequence[fx.Node | None], nodes: Iterable[fx.Node], output: Any) -> fx.GraphModule:
    """A graph of nodes of another one, with these inputs; None stands for one that nothing reads."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        placeholder = graph.placeholder(f"operand_{i}")
        if node is not None:
            env[node] = placeholder
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = graph.create_node(node.op, node.target, args, kwargs)
    graph.output(output(lambda leaves: tuple(None if leaf is None else env[leaf] for leaf in leaves)))
    return fx.GraphModule({}, graph)
