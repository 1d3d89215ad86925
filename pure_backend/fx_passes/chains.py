"""Calls of one body that follow each other, the layers of a model, as one loop.

Before: `%s = body(%x, %w0); %t = body(%s[0], %w1); %u = body(%t[0], %w2)`.
After:  `%u = chain(body, 3 turns)(%x, %w0, %w1, %w2)`.

Compilation then does not grow with depth; the price is that what each turn has of its own, its parameters, is stacked in each
call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from torch import fx

from pure_backend.ir.describe import describe_tensor
from pure_backend.ir.facts import derive, facts, learn
from pure_backend.ir.region import Chain, Shared


def loop_chains(gm: fx.GraphModule) -> None:
    """Replace chains of calls of shared bodies by loops, in place."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    chain: list[fx.Node] = []
    for node in position:
        if not isinstance(node.target, Shared):
            continue
        if chain and not _follows(chain[-1], node):
            _loop(gm.graph, chain, position)
            chain = []
        chain.append(node)
    if chain:
        _loop(gm.graph, chain, position)
    gm.recompile()


def _follows(before: fx.Node, node: fx.Node) -> bool:
    return node.target.gm is before.target.gm and bool(_carried(before, node))


def _carried(before: fx.Node, node: fx.Node) -> tuple[tuple[int, int], ...]:
    """The inputs of a call that are results of the call before, of the same type as the input was there."""
    pairs = []
    for i, (arg, old) in enumerate(zip(node.args, before.args, strict=True)):
        is_result = arg.target is operator.getitem and arg.args[0] is before
        if is_result and describe_tensor(facts(arg).value) == describe_tensor(facts(old).value):
            pairs.append((i, arg.args[1]))
    return tuple(pairs)


def _loop(graph: fx.Graph, calls: Sequence[fx.Node], position: dict[fx.Node, int]) -> None:
    """One loop in the place of a chain's last call, if what the calls are given and give allows it."""
    if len(calls) < 2:
        return
    first, last = calls[0], calls[-1]
    carried = _carried(first, calls[1])
    inputs = [i for i in range(len(first.args)) if i not in dict(carried)]
    own = tuple(i for i in inputs if any(call.args[i] is not first.args[i] for call in calls))
    inside: set[object] = {*calls, *(user for call in calls for user in call.users)}
    regular = all(_carried(a, b) == carried for a, b in itertools.pairwise(calls))
    independent = inside.isdisjoint(call.args[i] for call in calls for i in inputs)
    results = [(turn, user) for turn, call in enumerate(calls) for user in call.users if not inside.issuperset(user.users)]
    late = all(position[user] > position[last] for _, node in results for user in node.users if user not in inside)
    if not (regular and independent and late):
        return
    wanted = tuple((turn, node.args[1]) for turn, node in results)
    operands = [arg for i, arg in enumerate(first.args) for arg in ([c.args[i] for c in calls] if i in own else [arg])]
    with graph.inserting_after(last):
        loop = graph.call_function(Chain(first.target.gm, len(calls), carried, own, wanted), tuple(operands))
    values = tuple(facts(node).value for _, node in results)
    learn(loop, value=values, bodies=(first.target.gm,), scopes=facts(first).scopes[:-1])
    after = loop
    for i, (_, node) in enumerate(results):
        with graph.inserting_after(after):
            after = derive(graph.call_function(operator.getitem, (loop, i)), node)
        node.replace_all_uses_with(after, delete_user_cb=lambda user: user not in inside)
    for call in reversed(calls):
        for user in list(call.users):
            graph.erase_node(user)
        graph.erase_node(call)
