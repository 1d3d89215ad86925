"""What each turn of a loop has of its own, stacked before the program and not in it.

Before: `%y = chain(body, 3 turns)(%x, %w0, %w1, %w2)` with an input for each of `%w0, %w1, %w2`.
After:  `%y = chain(body, 3 turns)(%x, %w)` with one input `%w`, their stack.

XLA compiles the stacking of 900 parameters, and the taking apart of their gradients, longer than the loop itself; torch stacks
them in nine operators, and its autograd takes the gradients apart as views.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from pure_backend.fx_passes.functional import Functional, Inputs, Source
from pure_backend.ir.donors import donors
from pure_backend.ir.facts import facts, learn
from pure_backend.ir.region import Chain


def hoist_stacks(functional: Functional, kept: Iterable[int]) -> Functional:
    """Give the loops of a functional graph the stacks of arguments that nothing else reads; the graph is edited.

    Args:
        functional: The graph.
        kept: Arguments that stay inputs by themselves, like written and donated ones.

    Returns:
        The graph with what its inputs are now.
    """
    gm = functional.gm
    loops = [node for node in gm.graph.nodes if isinstance(node.target, Chain)]
    if not loops:
        return functional
    placeholders = gm.graph.find_nodes(op="placeholder", sort=True)
    sources: dict[fx.Node, Source] = dict(zip(placeholders, functional.inputs.sources, strict=True))
    given_away = (sources[node] for node in donors(gm))
    alone = {*kept, *given_away, *(w.input for w in functional.write_backs), *functional.storage_inputs}
    for node in loops:
        stacked, uses = {}, Counter(node.args)
        for i, operands in enumerate(node.target.by_input(node.args)):
            if isinstance(operands, list) and _may_be_stacked(operands, node, uses, sources, alone):
                stacked[i] = _stack(gm.graph, operands, sources)
        if stacked:
            _give(node, stacked)
    for node in placeholders:
        if node not in sources:
            gm.graph.erase_node(node)
    gm.recompile()
    left = tuple(sources[node] for node in gm.graph.find_nodes(op="placeholder", sort=True))
    return dataclasses.replace(functional, inputs=Inputs(left))


def _may_be_stacked(operands: Sequence[fx.Node], loop: fx.Node, uses: Any, sources: Any, alone: AbstractSet[Source]) -> bool:
    """Whether nothing but these operands of this loop reads these inputs, and all or none of them have a gradient."""
    here = Counter(operands)
    if any(uses[node] != here[node] or list(node.users) != [loop] or node.op != "placeholder" for node in here):
        return False
    values = [facts(node).value for node in here]
    tensors = all(isinstance(value, torch.Tensor) for value in values)
    return tensors and not any(sources[node] in alone for node in here) and len({v.requires_grad for v in values}) == 1


def _stack(graph: fx.Graph, operands: Sequence[fx.Node], sources: dict[fx.Node, Source]) -> fx.Node:
    """A placeholder for the stack of these, before the first of them."""
    with graph.inserting_before(operands[0]), torch.enable_grad():
        stack = graph.placeholder(f"stack_{operands[0].name}")
        learn(stack, value=torch.stack([facts(node).value for node in operands]))
    sources[stack] = tuple(sources[node] for node in operands)  # type: ignore[misc]
    for node in set(operands):
        del sources[node]
    return stack


def _give(loop: fx.Node, stacked: dict[int, fx.Node]) -> None:
    """Make stacks the operands of a loop."""
    operands = enumerate(loop.target.by_input(loop.args))
    given = [[stacked[i]] if i in stacked else node if isinstance(node, list) else [node] for i, node in operands]
    loop.target = dataclasses.replace(loop.target, stacked=loop.target.stacked | frozenset(stacked))
    loop.args = tuple(node for nodes in given for node in nodes)
