"""DTensors as values of their whole: a graph over DTensors becomes one over plain tensors of global shape.

What torch would send between ranks is left to XLA's partitioner; the graph only says how values lie:

Before: `%y = linear(%x, %w); %z = redistribute(%y)` over DTensors.
After:  `%u = stored(%w); %y = linear(%x, %u); %z = constrain(%y)` over plain ones, and constraints of what leaves the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.errors import ImpureGraphError
from pure_backend.fx_passes.functional import Functional, Value
from pure_backend.fx_passes.inputs import argument_name
from pure_backend.ir.facts import derive, facts
from pure_backend.ir.functional_ops import constrain, stored
from pure_backend.ir.impurity import Impurity
from pure_backend.ir.layout import Cuts, Layout, MeshOfRanks, everywhere, is_distributed, layout_of, on_every_rank


def outside(reason: str) -> Impurity:
    """Why a graph over DTensors runs in eager as a whole: its stages would not agree on how values lie."""
    return Impurity("distributed", "", "the graph", reason)


def whole_graph(impurities: Sequence[Impurity]) -> list[Impurity]:
    """The impurities of nodes as one of their graph."""
    return [outside(f"a DTensor graph with {impurities[0]}")]


@dataclasses.dataclass(frozen=True, eq=False)
class MeshBorder:
    """A graph of whole values on a mesh, and how a call of the graph over DTensors becomes a call of it.

    Attributes:
        gm: The graph.
        mesh: The mesh.
        leaves: For each leaf of the output how it lies, and whether the caller gets a plain tensor; None if it is no tensor.
    """

    gm: fx.GraphModule
    mesh: MeshOfRanks
    leaves: tuple[tuple[Cuts, bool] | None, ...]
    carriers: tuple[()] = ()

    def enter(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, with DTensors for plain tensors: every rank has the whole of these."""
        plain = [isinstance(arg, torch.Tensor) and not is_distributed(arg) for arg in args]
        return [on_every_rank(arg, self.mesh) if p else arg for arg, p in zip(args, plain, strict=True)]

    def leave(self, args: Sequence[Any], results: Any) -> Any:
        """The original graph's outputs."""
        leaves, spec = pytree.tree_flatten(results)
        plain = [known is not None and known[1] for known in self.leaves]
        given = [leaf.to_local() if p and is_distributed(leaf) else leaf for leaf, p in zip(leaves, plain, strict=True)]
        return pytree.tree_unflatten(given, spec)

    def hold(self, functional: Functional, args: Sequence[Any]) -> None:
        """Say in a functional graph, which is edited, how parameters, results and new values of arguments lie."""
        layouts = {i: layout_of(arg) for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        known: dict[int, Layout] = {i: layout for i, layout in layouts.items() if isinstance(layout, Layout)}
        graph = functional.gm.graph
        data = _data_axes(args, known)
        for node, source in zip(graph.find_nodes(op="placeholder", sort=True), functional.inputs.sources, strict=True):
            if isinstance(source, int) and facts(node).value.requires_grad and args[source].is_leaf:
                self._store(graph, node, known[source].cuts, data)
        wanted = {w.index: known[w.input].cuts for w in functional.write_backs}
        free = any(
            cut is not None for i in known if args[i].requires_grad for axis, cut in enumerate(known[i].cuts) if axis in data
        )
        for leaf, output in zip(self.leaves, functional.outputs, strict=True):
            if (
                leaf is not None and isinstance(output, Value) and (leaf[1] or not free)
            ):  # else eager's cut is not what data has
                wanted.setdefault(output.index, leaf[0])
        output = graph.output_node()
        output.args = (tuple(self._result(graph, node, wanted.get(i)) for i, node in enumerate(output.args[0])),)
        functional.gm.recompile()

    def _store(self, graph: fx.Graph, node: fx.Node, cuts: Cuts, data: frozenset[int]) -> None:
        used = tuple(None if axis in data else cut for axis, cut in enumerate(cuts))
        last = graph.find_nodes(op="placeholder", sort=True)[-1]
        with graph.inserting_after(last):
            new = derive(graph.call_function(stored, (node, self.mesh.axes, cuts, used)), node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def _result(self, graph: fx.Graph, node: fx.Node, cuts: Cuts | None) -> fx.Node:
        if cuts is None:
            return node
        with graph.inserting_before(graph.output_node()):
            return derive(graph.call_function(constrain, (node, self.mesh.axes, cuts)), node)


def _data_axes(args: Sequence[Any], layouts: dict[int, Layout]) -> frozenset[int]:
    """The axes of the mesh along which data is cut: a parameter that is cut along one too is gathered where it is used."""
    data = [layout for i, layout in layouts.items() if not args[i].requires_grad]
    return frozenset(axis for layout in data for axis, cut in enumerate(layout.cuts) if cut is not None)


def mesh_border(gm: fx.GraphModule, args: Sequence[Any]) -> MeshBorder | None:
    """The border of a call with DTensors that a program can take; None if there are no DTensors.

    Raises:
        ImpureGraphError: They are no input of a program.
    """
    placeholders = gm.graph.find_nodes(op="placeholder", sort=True)
    found = [(argument_name(node), layout_of(arg)) for node, arg in zip(placeholders, args, strict=True) if is_distributed(arg)]
    if not found:
        return None
    if wrong := [f"argument {name!r} is {layout}" for name, layout in found if isinstance(layout, str)]:
        raise ImpureGraphError([outside("; ".join(wrong[:3]))])
    meshes = {layout.mesh: name for name, layout in found if isinstance(layout, Layout)}
    if len(meshes) > 1:
        shown = " and ".join(f"{name!r} on {mesh}" for mesh, name in meshes.items())
        raise ImpureGraphError([outside(f"arguments lie on different meshes, {shown}")])
    (mesh,) = meshes
    leaves = pytree.tree_leaves(gm.graph.output_node().args[0])
    return MeshBorder(_of_wholes(gm, mesh), mesh, tuple(_leaf(leaf, mesh) for leaf in leaves))


def _leaf(node: Any, mesh: MeshOfRanks) -> tuple[Cuts, bool] | None:
    """How an output lies, and whether it is plain; what is a sum over ranks in eager is summed."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return (_cuts(node, mesh), False) if is_distributed(value) else (everywhere(mesh).cuts, True)


def _cuts(node: fx.Node, mesh: MeshOfRanks) -> Cuts:
    """How a node's DTensor lies for Dynamo; sums over ranks are summed, and so is all that no program says."""
    from torch.distributed.tensor import Shard

    value = node.meta["example_value"]
    cuts = tuple(p.dim % max(value.ndim, 1) if type(p) is Shard else None for p in value.placements)
    whole = all(isinstance(n, int) for n in value.shape) and Layout(mesh, cuts).undivided(value.shape)
    return everywhere(mesh).cuts if whole else cuts


def _of_wholes(gm: fx.GraphModule, mesh: MeshOfRanks) -> fx.GraphModule:
    """A copy of a graph over DTensors in which changes of placement say how whole values lie.

    Raises:
        ImpureGraphError: It takes local parts, or makes DTensors of them.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    derive(graph.output_node(), gm.graph.output_node())
    for node in list(graph.nodes):
        if (how := _movement(node)) is not None:
            if (cuts := _moved(node, how, mesh)) is None:
                raise ImpureGraphError([outside(f"{how} of a DTensor that is cut: keep it outside of the compiled function")])
            node.op, node.target, node.args, node.kwargs = "call_function", constrain, (node.args[0], mesh.axes, cuts), {}
    graph.eliminate_dead_code(lambda node: node.target is not getattr)  # `x.device_mesh`, which placements were made with
    return fx.GraphModule(gm, graph)


_MOVEMENTS = ("redistribute", "full_tensor", "to_local", "from_local")


def _movement(node: fx.Node) -> str | None:
    """Which change of placement a node is, if it is one; Dynamo spells them as functions of its own or as methods."""
    name = (
        node.target if node.op == "call_method" else getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    )
    name = str(name).removeprefix("prim_")
    return name if name in _MOVEMENTS else None


def _moved(node: fx.Node, how: str, mesh: MeshOfRanks) -> Cuts | None:
    """How the result of a change of placement lies; None if it is no value of its own."""
    if how == "full_tensor":
        return everywhere(mesh).cuts
    if how == "redistribute":
        return None if any(p.is_partial() for p in node.meta["example_value"].placements) else _cuts(node, mesh)
    given = node.args[0].meta.get("example_value")
    whole = how == "to_local" and is_distributed(given) and all(p.is_replicate() for p in given.placements)
    return everywhere(mesh).cuts if whole else None
