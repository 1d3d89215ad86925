"""Wrapper subclasses become plain tensors: what touches one is taken apart by torch, under the wrapper's own dispatch.

Before (w is a wrapper of q and s):     After:
    %l = linear(x, w)                       %f = aten._to_copy(q, f32); %m = aten.mul(f, s); %t = aten.t(m)
    %s = l.sin()                            %l = aten.mm(x, t); %s = l.sin()

Nodes that hand wrappers to each other are taken apart together. What autograd records is a node of its own, with torch's own
backward (`differentiated`): the derivative of what a wrapper's operators do is not what torch gives (rounding has none).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.errors import ImpureGraphError
from pure_backend.fx_passes.border import Border, Carrier
from pure_backend.fx_passes.regions import changes_mode
from pure_backend.fx_passes.stretch import (
    Gradient,
    Stretch,
    differentiated,
    has_body,
    is_autograd_function,
    plain,
    requires_grad,
)
from pure_backend.ir.describe import tensor_leaves
from pure_backend.ir.facts import derive, facts
from pure_backend.ir.failures import failure
from pure_backend.ir.impurity import Impurity
from pure_backend.ir.wrapper import Structure, is_wrapper, pieces_of, take_apart


def has_wrappers(gm: fx.GraphModule) -> bool:
    """Whether a value of a propagated graph is a wrapper."""
    return any(_holds_wrapper(node) for node in gm.graph.nodes)


def unwrap(gm: fx.GraphModule) -> Border:
    """The graph without wrappers, and how to call it.

    Args:
        gm: A propagated graph; it is not changed.

    Raises:
        ImpureGraphError: With the nodes that touch wrappers and cannot be taken apart.
    """
    return _Pass(gm).run()


def _holds_wrapper(node: fx.Node) -> bool:
    return any(map(is_wrapper, tensor_leaves(facts(node).value)))


def _touches(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    return _holds_wrapper(node) or any(map(_holds_wrapper, node.all_input_nodes))


def _stretches(nodes: list[fx.Node]) -> list[tuple[int, int]]:
    """The first and the last node of each stretch: it ends behind the last use of a wrapper, or of a tuple, made in it."""
    place = {node: i for i, node in enumerate(nodes)}
    stretches: list[tuple[int, int]] = []
    for first, node in enumerate(nodes):
        if _touches(node):
            passed_on = _holds_wrapper(node) or not isinstance(facts(node).value, torch.Tensor)
            users = [place[user] for user in node.users if user.op != "output"] if passed_on else []
            last = max([first, *users])
            if stretches and first <= stretches[-1][1]:
                first, last = stretches[-1][0], max(last, stretches.pop()[1])
            stretches.append((first, last))
    return stretches


class _Pieces(tuple):
    """The nodes of a wrapper's plain tensors."""


class _Pass:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graph = fx.Graph()
        self.nodes = list(gm.graph.nodes)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.env: dict[fx.Node, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.carried: list[fx.Node] = []
        self.carriers: list[Carrier] = []
        self.held: list[fx.Node] = []
        self.constants: list[torch.Tensor] = []
        self.known: dict[tuple, Any] = {}
        self.bodies: dict[fx.GraphModule, str] = {}

    def run(self) -> Border:
        for node in self.placeholders:
            self.placeholder(node)
        starts = {first: self.nodes[first : last + 1] for first, last in _stretches(self.nodes)}
        self.refuse(starts.values())
        inside = {node for stretch in starts.values() for node in stretch}
        for place, node in enumerate(self.nodes):
            if place in starts:
                self.take_apart_or_refuse(starts[place])
            elif node not in inside and node.op not in ("placeholder", "output"):
                self.env[node] = self.copy(node)
        return self.border(self.nodes[-1])

    def placeholder(self, node: fx.Node) -> None:
        value = facts(node).value
        if is_wrapper(value):
            self.env[node] = _Pieces(self.input(f"{node.name}_inner_{i}", node) for i in range(len(take_apart(value)[0])))
        else:
            self.env[node] = self.copy(node)

    def input(self, name: str, of: fx.Node) -> fx.Node:
        node = self.graph.placeholder(name)
        node.target = node.name  # which is unique
        return derive(node, of)

    def copy(self, node: fx.Node) -> fx.Node:
        """A node that touches no wrapper."""
        copied = self.graph.node_copy(node, self.read)
        if node.op == "get_attr":
            self.attributes[node.target] = getattr(self.gm, node.target)
        return copied

    def read(self, node: fx.Node) -> Any:
        """What stands for a node; its value, if it is a plain one that a stretch made."""
        return self.env[node] if node in self.env else facts(node).value

    def refuse(self, stretches: Iterable[list[fx.Node]]) -> None:
        """Name all nodes that cannot be taken apart, at once."""
        found = [(node, why) for stretch in stretches if (why := _reason(stretch)) for node in stretch if _touches(node)]
        if found:
            raise ImpureGraphError([Impurity.of(node, "layout", why) for node, why in found])

    def take_apart_or_refuse(self, nodes: list[fx.Node]) -> None:
        try:
            self.take_apart(Stretch.of(nodes))
        except Exception as error:
            raise ImpureGraphError([failure(node, error) for node in nodes if _touches(node)]) from error

    def take_apart(self, stretch: Stretch) -> None:
        operands = [piece for node in stretch.inputs for piece in self.pieces(node)]
        results = self.recorded(stretch, operands) if stretch.recorded else self.unrecorded(stretch, operands)
        remaining = iter(results)
        for node in stretch.outputs:
            value = facts(node).value
            own = [next(remaining) for _ in pieces_of([value])]
            self.env[node] = _Pieces(own) if is_wrapper(value) else own[0]

    def pieces(self, node: fx.Node) -> Sequence[fx.Node]:
        found = self.env[node]
        return found if isinstance(found, _Pieces) else (found,)

    def unrecorded(self, stretch: Stretch, operands: list[fx.Node]) -> list[fx.Node]:
        """Put the nodes of a stretch here that autograd does not record; its results."""
        results = self.inline(self.once(plain, stretch), operands, stretch.nodes[0])
        if not any(map(requires_grad, stretch.inputs)):
            return results
        return [self.call(torch.Tensor.detach, (node,), stretch.nodes[0]) for node in results]

    def inline(self, gm: fx.GraphModule, operands: Sequence[fx.Node], at: fx.Node) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder", sort=True), operands, strict=True))
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                env[node] = self.constant(getattr(gm, node.target), at)
            elif node.op == "call_function":
                env[node] = self.call(
                    node.target, *fx.map_arg((node.args,), env.__getitem__), at, fx.map_arg(node.kwargs, env.__getitem__)
                )
        return [env[node] for node in gm.graph.output_node().args[0]]

    def call(self, target: Any, args: tuple, at: fx.Node, kwargs: Any = None) -> fx.Node:
        """A new node that stands where `at` stood."""
        return derive(self.graph.call_function(target, args, dict(kwargs or {})), at)

    def constant(self, value: torch.Tensor, at: fx.Node) -> fx.Node:
        self.held.append(self.input(f"{at.name}_constant", at))
        self.constants.append(value)
        return self.held[-1]

    def recorded(self, stretch: Stretch, operands: list[fx.Node]) -> list[fx.Node]:
        """One node, with torch's own backward as its gradient; its results."""
        found, at = self.once(differentiated, stretch), stretch.nodes[0]
        operands = operands + [
            node for gradient in found.gradients for node in self.carry(stretch.inputs[gradient.input], gradient)
        ]
        operands += [self.constant(value, at) for value in found.split.constants]
        bodies = tuple(self.body(body) for body in (found.split.forward, found.split.backward))
        fixed = [i for i, carries in enumerate(found.split.carries) if not carries]
        apply = torch.ops.higher_order.autograd_function_apply
        node = self.call(apply, (*bodies, *operands), at, {"non_differentiable_idx": fixed})
        return [self.call(operator.getitem, (node, i), at) for i in range(len(found.split.carries))]

    def once(self, trace: Callable[[Stretch], Any], stretch: Stretch) -> Any:
        """What a stretch is traced to, the same for equal ones."""
        key = (trace, stretch.key)
        if key not in self.known:
            self.known[key] = trace(stretch)
        return self.known[key]

    def carry(self, of: fx.Node, gradient: Gradient) -> list[fx.Node]:
        nodes = [self.input(f"{of.name}_gradient", of) for _ in gradient.likes]
        self.carried += nodes
        self.carriers.append(Carrier(self.placeholders.index(of), gradient.structure, gradient.likes))
        return nodes

    def body(self, gm: fx.GraphModule) -> fx.Node:
        name = self.bodies.setdefault(gm, f"apart_{len(self.bodies)}")
        self.attributes[name] = gm
        return self.graph.get_attr(name)

    def border(self, output: fx.Node) -> Border:
        leaves, spec = pytree.tree_flatten(output.args[0])
        leaves = [self.first(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        distinct = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))
        slots = [self.slot(leaf) for leaf in distinct]
        constants = [leaf for leaf in leaves if not isinstance(leaf, fx.Node)]
        numbers = iter(range(len(distinct), len(leaves)))
        places = tuple(distinct.index(leaf) if isinstance(leaf, fx.Node) else next(numbers) for leaf in leaves)
        self.graph.output((*(node for _, own in slots for node in own), *constants))
        self.placeholders_first()
        gm = fx.GraphModule(self.attributes, self.graph)
        gm.graph.lint()
        values = [facts(node).value for node in self.placeholders]
        structures = tuple(take_apart(value)[1] if is_wrapper(value) else None for value in values)
        wraps = (*(slot for slot, _ in slots), *[None] * len(constants))
        return Border(gm, structures, tuple(self.carriers), tuple(self.constants), wraps, places, spec)

    def first(self, leaf: fx.Node) -> fx.Node:
        """The first node with the very wrapper of a leaf as value: a wrapper written in place stays one object."""
        value = facts(leaf).value
        return next(node for node in self.nodes if facts(node).value is value) if is_wrapper(value) else leaf

    def slot(self, leaf: fx.Node) -> tuple[int | Structure | None, Sequence[Any]]:
        """What the caller gets for a leaf of the output, and the results of the new graph that it is made of."""
        value = facts(leaf).value
        if not is_wrapper(value):
            return None, [self.read(leaf)]
        if leaf.op == "placeholder":
            return self.placeholders.index(leaf), []
        return take_apart(value)[1], self.pieces(leaf)

    def placeholders_first(self) -> None:
        """Bring the inputs into the order in which `Border.enter` gives them."""
        others = {*self.carried, *self.held}
        own = [node for node in self.graph.nodes if node.op == "placeholder" and node not in others]
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for node in (*own, *self.carried, *self.held):
            first.prepend(node)


def _reason(nodes: list[fx.Node]) -> str:
    """Why the nodes of a stretch cannot be taken apart, or an empty string."""
    stretch, inside = Stretch.of(nodes), set(nodes)
    if any(has_body(node) and not is_autograd_function(node) for node in nodes):
        return "a higher-order operator among operators on a tensor subclass"
    if any(changes_mode(node) for node in nodes):
        return "a mode changes among operators on a tensor subclass"
    if any(isinstance(facts(arg).value, float) and arg.op != "placeholder" for node in nodes for arg in node.all_input_nodes):
        return "a Python float that changes from call to call meets a tensor subclass"
    if any(arg not in inside or not stretch.recorded for node in nodes for arg in facts(node).recorded):
        return "autograd records a write to an input of operators on a tensor subclass"
    leaving = [node for node in stretch.outputs if is_wrapper(facts(node).value)]
    if any(map(requires_grad, leaving)):
        return "a tensor subclass that requires grad leaves the graph: the class of its gradient is known in the backward only"
    if stretch.recorded and stretch.shares_memory:
        return "a result of operators on a tensor subclass, which autograd records, shares memory"
    return ""
