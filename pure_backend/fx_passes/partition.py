"""An impure graph -> stages: pure partitions, as large as can be, and the eager nodes between them.

Before:                              After, with `watch` impure:
    %a = x.sin()                         0 pure:  x -> (a, d)        %a = x.sin(); %d = x + 1
    %b = watch(a)                        1 eager: a -> b             %b = watch(a)
    %c = b.cos()                         2 pure:  b, d -> e          %c = b.cos(); %e = c * d
    %d = x + 1
    %e = c * d

Law: the stages one after the other, each in the modes in which the first found the thread, compute what the graph computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.fx_passes.regions import Modes, StageModes, changes_mode
from pure_backend.fx_passes.schedule import schedule
from pure_backend.ir.facts import facts, learn, origin


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a graph.

    Attributes:
        gm: Its nodes; it returns a tuple of the values of `outputs`.
        pure: Whether it is to be compiled.
        inputs: Names of the nodes of the original graph whose values it takes.
        outputs: Names of the nodes whose values others take, or the graph returns.
        nodes: How many nodes of the original graph it holds.
    """

    gm: fx.GraphModule
    pure: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: int


def partition(gm: fx.GraphModule, impure: Iterable[str], min_size: int) -> tuple[tuple[Stage, ...], bool | None]:
    """Cut a propagated graph into stages, in the order to run them.

    Args:
        gm: The graph.
        impure: Names of its impure nodes.
        min_size: A pure partition of fewer nodes runs in eager.

    Returns:
        The stages, and whether gradients are recorded after the graph, None if it does not say.
    """
    names = frozenset(impure)
    movable = [node for node in gm.graph.nodes if _runs(node)]
    stages = schedule(movable, {node for node in movable if origin(node) in names})
    groups = _numbered(movable, stages, min_size)
    builders = [_Builder(gm, pure) for pure in _kinds(groups)]
    modes = Modes(gm)
    for node in gm.graph.nodes:
        if changes_mode(node):
            modes.pass_over(node)
        elif node in groups:
            builders[groups[node][0]].add(node, modes)
    produced = {node: place for node, (place, _) in groups.items()}
    return tuple(builder.finish(place, produced) for place, builder in enumerate(builders)), modes.grad


def _runs(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output") and not changes_mode(node)


def _numbered(nodes: list[fx.Node], stages: dict[fx.Node, int], min_size: int) -> dict[fx.Node, tuple[int, bool]]:
    """For each node the number of its group and whether that is pure; neighbouring eager stages are one group."""
    sizes: dict[int, int] = {}
    for node in nodes:
        sizes[stages[node]] = sizes.get(stages[node], 0) + 1
    groups: dict[int, tuple[int, bool]] = {}
    last = (-1, True)
    for stage in sorted(sizes):
        pure = stage % 2 == 0 and sizes[stage] >= min_size
        if pure or last[1]:
            last = (last[0] + 1, pure)
        groups[stage] = last
    return {node: groups[stages[node]] for node in nodes}


def _kinds(groups: dict[fx.Node, tuple[int, bool]]) -> list[bool]:
    kinds = dict(groups.values())
    return [kinds[place] for place in sorted(kinds)]


class _Builder:
    """The graph of one stage while it is filled."""

    def __init__(self, gm: fx.GraphModule, pure: bool) -> None:
        self.gm = gm
        self.pure = pure
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self.nodes: list[fx.Node] = []
        self.modes: StageModes | None = None

    def add(self, node: fx.Node, modes: Modes) -> None:
        if self.modes is None:
            self.modes = StageModes(self.graph, modes)
        self.modes.follow()
        self.env[node] = self.graph.node_copy(node, self.value)
        self.nodes.append(node)

    def value(self, node: fx.Node) -> fx.Node:
        """The node of this stage that stands for a node of the original graph."""
        if node not in self.env:
            if node.op == "get_attr":
                self.env[node] = self.graph.node_copy(node)
            else:
                self.inputs.append(node)
                self.env[node] = self._placeholder(node)
        return self.env[node]

    def _placeholder(self, node: fx.Node) -> fx.Node:
        name = str(node.target) if node.op == "placeholder" else node.name
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            placeholder = self.graph.placeholder(name)
        learn(placeholder, donated=facts(node).donated)
        return placeholder

    def finish(self, place: int, produced: dict[fx.Node, int]) -> Stage:
        if self.modes is not None:
            self.modes.close()
        outputs = [node for node in self.nodes if any(produced.get(user) != place for user in node.users)]
        self.graph.output(tuple(self.env[node] for node in outputs))
        self.inputs.reverse()  # each placeholder was put before those made earlier
        gm = fx.GraphModule(self.gm, self.graph)
        names = (tuple(node.name for node in nodes) for nodes in (self.inputs, outputs))
        return Stage(gm, self.pure, *names, len(self.nodes))


def for_arguments(stage: Stage, spec: pytree.TreeSpec, floats: Sequence[bool]) -> fx.GraphModule:
    """A pure stage's graph, with one placeholder per leaf of its arguments.

    What an eager node hands over need not be a tensor. Of a tuple each element becomes an input. A Python float becomes a
    tensor and an `item()` of it, as Dynamo spells a float that may change, so that a new value compiles nothing.

    Args:
        stage: The stage.
        spec: The pytree of its arguments.
        floats: For each leaf whether it is a Python float.
    """
    graph = fx.Graph()
    leaves = [graph.placeholder(f"leaf_{i}") for i in range(spec.num_leaves)]
    read = [graph.call_method("item", (leaf,)) if is_float else leaf for leaf, is_float in zip(leaves, floats, strict=True)]
    values = pytree.tree_unflatten(read, spec)
    env = dict(zip(stage.gm.graph.find_nodes(op="placeholder", sort=True), values, strict=True))
    for node in stage.gm.graph.nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    return fx.GraphModule(stage.gm, graph)
