"""Writes and views become values: after this pass a graph is a function of its inputs.

Every storage that is written somewhere in the graph has a *cell*: the present value of its base, and where the base lies. A
read of any tensor on that storage reads the cell through the tensor's geometry; a write, through whatever view, makes a new
value of the cell. Storages that nobody writes are left alone, so most graphs pass through untouched.

Before:                                  After:
    %v = x.view(-1)                          %f = Functionalized("mul_", writes=(0,))(read_view(x, ...), 2)
    %m = v.mul_(2)                           %c = write_view(x, f[1], ...)
    return (x + 1, v)                        return (c + 1, c)      # x <- c is a write-back, v a view of the input x
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.errors import ImpureGraphError, UnsupportedOperatorError
from pure_backend.fx_passes.foreach import one_after_the_other
from pure_backend.fx_passes.functional import Alias, Constant, Functional, Inputs, Value, WriteBack
from pure_backend.fx_passes.replay import SAME, view_between, view_by_strides, view_of_output
from pure_backend.ir import functional_ops
from pure_backend.ir.describe import tensor_leaves
from pure_backend.ir.facts import derive, facts, learn, reads_input_scalar
from pure_backend.ir.failures import failure
from pure_backend.ir.geometry import Geometry, Placed
from pure_backend.ir.views import OutOfBase, access_of

_DETACHING = ("detach", torch.Tensor.detach, torch.detach, torch._C._autograd._get_data_attr)


def functionalize(gm: fx.GraphModule) -> Functional:
    """Turn a propagated graph into a function of values.

    Raises:
        ImpureGraphError: A write of one node cannot be expressed.
        UnsupportedOperatorError: The written inputs overlap in a way no program can express.
    """
    return _Pass(gm).run()


def functionalize_body(gm: fx.GraphModule) -> fx.GraphModule:
    """Turn the propagated body of a higher-order operator into a function of values.

    Its outputs are one per leaf, and then the new value of each input that it writes.

    Raises:
        UnsupportedOperatorError: Inputs that the body writes overlap.
    """
    run = _Pass(gm)
    run.visit_all()
    if run.storage_inputs:
        raise UnsupportedOperatorError("the body of a higher-order operator writes inputs that overlap in memory")
    leaves = pytree.tree_leaves(gm.graph.output_node().args[0])
    results = [run.read(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    list(run.write_backs(results))  # appends the new values
    return run.module(results)


@dataclasses.dataclass
class _Cell:
    """The present value of a storage.

    Attributes:
        base: Where the value lies in the storage; other tensors on it are read through their strides from there.
        node: The node of the new graph that computes it.
        requires_grad: Whether the value carries a gradient.
        recorded: Whether autograd recorded a write, so that an input that is written gets a history.
        written: Whether there was a write, so that an input has to be written back.
    """

    base: Geometry
    node: fx.Node
    requires_grad: bool
    recorded: bool = False
    written: bool = False


def _by_storage(placeholders: list[fx.Node]) -> dict[int | None, list[fx.Node]]:
    """The inputs that lie in each storage."""
    found: dict[int | None, list[fx.Node]] = {}
    for p in placeholders:
        geometry = facts(p).geometry
        found.setdefault(geometry and geometry.storage, []).append(p)
    return found


class _Pass:
    """One walk over the old graph that makes the new one.

    Whoever wants the value of an old node asks `read`, never `env`: its storage may have been written since the node ran.

    Attributes:
        env: For each old node its new one. Views of a cell, and plain numbers, have none.
        cells: The cell of each storage, from the first node on it that is seen.
        with_cells: The storages that have one; nodes on others are copied as they are.
        creators: The first node on each storage: an input, or the one that allocated it.
        strided: What `as_strided` shows of each storage; it may lie outside of its argument.
        reads: For each old node the cell's value at its last read, and what the read gave: the same until the next write.
        geometries: Where old nodes lie that were given another shape in place.
        detached: Old nodes that autograd does not connect with their storage, although the cell may carry a gradient.
        runtime_scalars: Old nodes whose value is a number of the call; other numbers are constants.
        storage_inputs: See `Functional`.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graph = fx.Graph()
        self.placeholders = gm.graph.find_nodes(op="placeholder", sort=True)
        self.inputs_of = _by_storage(self.placeholders)
        self.strided = _strided(gm)
        self.with_cells = _storages_with_cells(gm) | self.strided.keys()
        self.reshaped = _reshaped(gm)
        self.cells: dict[int, _Cell] = {}
        self.env: dict[fx.Node, fx.Node] = {}
        self.reads: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self.storage_inputs: dict[int, tuple[int, int]] = {}
        self.creators: dict[int, fx.Node] = {}
        self.detached: set[fx.Node] = set()
        self.geometries: dict[fx.Node, Geometry] = {}
        self.runtime_scalars: set[fx.Node] = set()

    def run(self) -> Functional:
        self.visit_all()
        return self.finish(self.gm.graph.output_node())

    def visit_all(self) -> None:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.visit(node)
            elif node.op != "output":
                self.visit_or_refuse(node)

    def module(self, results: list[Any]) -> fx.GraphModule:
        """The new graph with these outputs."""
        derive(self.graph.output(tuple(results)), self.gm.graph.output_node())
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.gm, self.graph)

    def visit_or_refuse(self, node: fx.Node) -> None:
        try:
            self.visit(node)
        except Exception as error:
            raise ImpureGraphError([failure(node, error)]) from error

    def visit(self, node: fx.Node) -> None:
        known = facts(node)
        if not _has_tensor(known.value):
            return self.visit_plain(node)
        storage = known.geometry.storage if known.geometry else None
        if storage is not None:
            self.creators.setdefault(storage, node)
        if node.op == "placeholder":
            return self.visit_placeholder(node, storage)
        for arg, geometry in known.restrided:
            self.restride(arg, geometry)
        for arg in known.cut:
            self.cut(arg, node)
        if known.writes:  # before views: an operator in place returns what it wrote
            return self.visit_write(node)
        if storage in self.cells:
            return self.visit_view(node)
        self.env[node] = self.copy(node)
        if storage in self.with_cells:
            self.cells[storage] = _Cell(known.geometry, self.env[node], known.geometry.requires_grad)
        return None

    def visit_plain(self, node: fx.Node) -> None:
        """A node without tensors: a constant of this call (see `read`), a body of a higher-order op, or a write."""
        if facts(node).writes:
            self.visit_write(node)
        elif node.op == "placeholder":
            self.copy(node)  # keeps its position; whoever reads it gets its value
        elif isinstance(facts(node).value, fx.GraphModule):
            self.env[node] = self.copy(node)
        elif reads_input_scalar(node) or any(arg in self.runtime_scalars for arg in node.all_input_nodes):
            self.runtime_scalars.add(node)
            self.env[node] = self.copy(node)

    def visit_view(self, node: fx.Node) -> None:
        """A view of a cell needs no node, it is read when used; what matters is whether autograd connects them."""
        parents = [arg for arg in node.all_input_nodes if arg in self.detached]
        if parents or not facts(node).grad or node.target in _DETACHING:
            self.detached.add(node)

    def visit_placeholder(self, node: fx.Node, storage: int | None) -> None:
        inputs = self.inputs_of[storage]
        shown = [facts(p).geometry for p in inputs] + self.strided.get(storage, [])
        if storage not in self.with_cells or (len(inputs) == 1 and all(_lies_in(g, facts(node).geometry) for g in shown)):
            self.env[node] = self.copy(node)
            if storage in self.with_cells:
                self.cells[storage] = _Cell(facts(node).geometry, self.env[node], facts(node).geometry.requires_grad)
            return
        copied = self.copy(node)  # every original input keeps its position; only the first one is used, as the storage
        if storage in self.cells:
            return
        base = _whole_storage(facts(node).value, shown)
        before = facts(node).geometry.offset - int(base.storage_offset())
        self.storage_inputs[self.placeholders.index(node)] = (before, base.numel())
        learn(copied, value=base)
        self.cells[storage] = _Cell(Geometry.of(base)._replace(storage=storage), copied, base.requires_grad)

    def visit_write(self, node: fx.Node) -> None:
        if calls := one_after_the_other(node):
            return self.visit_calls(node, calls)
        known = facts(node)
        tensors = [arg for arg in pytree.tree_leaves((node.args, node.kwargs)) if _is_tensor(arg)]
        writes = tuple(tensors.index(arg) for arg in known.writes)
        new = self.copy(node)
        new.op, new.target = "call_function", functional_ops.Functionalized(node.target, writes)
        result = known.value if known.geometry is None else _at(known.value, known.geometry)
        learn(new, value=(result, *(self.value(arg) for arg in known.writes)), writes=())
        for i, arg in enumerate(known.writes):
            value = self.emit(operator.getitem, (new, i + 1), node, self.value(arg))
            self.write(arg, value, node)
        storage = known.geometry.storage if known.geometry else None
        if storage in self.cells:
            return  # the written argument itself
        self.env[node] = self.emit(operator.getitem, (new, 0), node, result)
        if storage in self.with_cells:
            self.cells[storage] = _Cell(known.geometry, self.env[node], known.geometry.requires_grad)

    def visit_calls(self, node: fx.Node, calls: list[tuple[str, tuple, dict[str, Any]]]) -> None:
        """A node that writes by several methods in turn; each writes its first argument."""
        if facts(node).recorded:
            raise UnsupportedOperatorError(
                "a list operator on tensors that share memory: autograd sees only some of its writes"
            )
        for method, args, kwargs in calls:
            fake = facts(args[0]).value
            new = self.emit(functional_ops.Functionalized(method, (0,)), fx.map_arg(args, self.read), node, (fake, fake))
            new.kwargs = fx.map_arg(kwargs, self.read)
            self.write(args[0], self.emit(operator.getitem, (new, 1), node, fake), node)

    def restride(self, arg: fx.Node, geometry: Geometry) -> None:
        """From here on `arg` shows its memory in another way."""
        if arg.op == "placeholder":
            raise UnsupportedOperatorError("the shape of an input is changed in place")
        for node in self.same(arg):
            self.geometries[node] = geometry
            self.reads.pop(node, None)

    def cut(self, arg: fx.Node, at: fx.Node) -> None:
        """From here on `arg` has no gradient history, and what is written to it begins a new one."""
        storage = facts(arg).geometry.storage
        if self.creators[storage].op == "placeholder":
            raise UnsupportedOperatorError("the gradient history of an input is cut in place")
        if any(_is_used_after(at, view) for view in self.views_with_history(arg, at)):
            raise UnsupportedOperatorError("the gradient history of a tensor is cut in place, but not that of its views")
        cell = self.cells[storage]
        cell.node = self.emit(torch.Tensor.detach, (cell.node,), at, facts(cell.node).value)
        cell.requires_grad = False

    def views_with_history(self, arg: fx.Node, at: fx.Node) -> list[fx.Node]:
        """The views of a tensor that were made before, and go on having a gradient."""
        same, storage = self.same(arg), facts(arg).geometry.storage
        earlier = itertools.takewhile(lambda node: node is not at, self.gm.graph.nodes)
        views = [node for node in earlier if (lies := facts(node).geometry) and lies.storage == storage and node not in same]
        return [node for node in views if facts(node).geometry.requires_grad and node not in self.detached]

    def same(self, arg: fx.Node) -> list[fx.Node]:
        """The nodes with the same tensor as value: operators in place return their argument."""
        return [node for node in self.gm.graph.nodes if node.op != "output" and facts(node).value is facts(arg).value]

    def value(self, node: fx.Node) -> torch.Tensor:
        """A fake tensor like the value of a node of the old graph at this point of the pass."""
        return _at(facts(node).value, self.geometry(node))

    def geometry(self, node: fx.Node) -> Geometry | None:
        """Where a node of the old graph lies at this point of the pass."""
        return self.geometries.get(node) or facts(node).geometry

    def write(self, arg: fx.Node, value: fx.Node, at: fx.Node) -> None:
        """Make `value` the content of `arg`."""
        geometry = self.geometry(arg)
        if geometry.overlaps_itself:
            raise UnsupportedOperatorError(
                "it writes to a tensor that shows an element of memory twice: write to a clone() of it"
            )
        cell = self.cells[geometry.storage]
        old = cell.node
        if not geometry.same_place(cell.base):
            where = (_portable(cell.base), _portable(geometry))
            value = self.emit(functional_ops.write_view, (old, value, *where), at, facts(old).value)
        if arg not in facts(at).recorded or arg in self.detached:  # eager goes on with the gradient of before the write
            if cell.requires_grad:
                value = self.emit(functional_ops.keep_gradient, (value, old), at, facts(old).value)
            elif not facts(at).grad:
                value = self.emit(torch.Tensor.detach, (value,), at, facts(old).value)
        else:
            cell.recorded = True
            cell.requires_grad = cell.requires_grad or facts(arg).value.requires_grad
        cell.node, cell.written = value, True

    def read(self, node: fx.Node) -> Any:
        """The node of the new graph that has the present value of a node of the old one, or the value of a plain node."""
        geometry = self.geometry(node)
        cell = self.cells.get(geometry.storage) if geometry else None
        if cell is None:
            return self.env[node] if node in self.env else facts(node).value
        at, seen = self.reads.get(node, (None, None))
        if at is cell.node:  # nobody wrote since
            return seen
        result = cell.node
        if not geometry.same_place(cell.base):
            where = (_portable(cell.base), _portable(geometry))
            result = self.emit(functional_ops.read_view, (cell.node, *where), node, self.value(node))
        if node in self.detached and cell.requires_grad:
            result = self.emit(torch.Tensor.detach, (result,), node, self.value(node))
        self.reads[node] = (cell.node, result)
        return result

    def copy(self, node: fx.Node) -> fx.Node:
        copied = self.graph.node_copy(node, self.read)
        if (geometry := facts(node).geometry) is not None:
            learn(copied, value=_at(facts(node).value, geometry), geometry=geometry)
        if bodies := facts(node).bodies:
            learn(copied, bodies=tuple(functionalize_body(body) for body in bodies))
        return copied

    def emit(self, target: Any, args: tuple, source: fx.Node, value: Any) -> fx.Node:
        """A new node that stands where `source` stood."""
        return derive(self.graph.call_function(target, args), source, value=value)

    def finish(self, output: fx.Node) -> Functional:
        leaves, spec = pytree.tree_flatten(output.args[0])
        results: list[fx.Node] = []
        finder = _Outputs(self, results)
        outputs = finder.describe(leaves)
        differentiable = [facts(node).value.requires_grad for node in finder.positions]
        write_backs = tuple(self.write_backs(results))
        differentiable += [write_back.recorded for write_back in write_backs]
        gm = self.module(results)
        inputs = Inputs(tuple(range(len(self.placeholders))))
        carries, leaves = tuple(differentiable), tuple(outputs)
        return Functional(gm, inputs, carries, leaves, spec, write_backs, self.storage_inputs, self.placed())

    def placed(self) -> Placed:
        """The inputs on storages that are written or read by `as_strided`."""
        return Placed(self.inputs_on(self.with_cells), self.inputs_on(self.strided.keys()))

    def inputs_on(self, storages: Collection[int]) -> frozenset[int]:
        return frozenset(i for i, p in enumerate(self.placeholders) if (g := facts(p).geometry) and g.storage in storages)

    def write_backs(self, results: list[fx.Node]):
        for position, node in enumerate(self.placeholders):
            geometry = facts(node).geometry
            cell = self.cells.get(geometry.storage) if geometry else None
            if cell is None or not cell.written or self.creators[geometry.storage] is not node:
                continue
            results.append(cell.node)
            recorded = cell.recorded and cell.requires_grad
            yield WriteBack(position, len(results) - 1, recorded, position in self.storage_inputs)


class _Outputs:
    """Decides for every output leaf whether it is computed, constant, or shares memory."""

    def __init__(self, of: _Pass, results: list[fx.Node]) -> None:
        self.of = of
        self.results = results
        self.positions: dict[fx.Node, int] = {}

    def describe(self, leaves: list[Any]) -> list[Value | Constant | Alias]:
        shared = _storages_seen_twice(leaves)
        return [self.leaf(leaf, shared) for leaf in leaves]

    def leaf(self, leaf: Any, shared: set[int]) -> Value | Constant | Alias:
        if not isinstance(leaf, fx.Node):
            return Constant(leaf)
        known = facts(leaf)
        if known.geometry is None:
            return Constant(known.value)
        creator = self.of.creators[known.geometry.storage]
        reshaped = known.geometry.storage in self.of.reshaped
        if creator.op == "placeholder":
            origin = self.input_of(leaf, creator)
            view = view_by_strides(origin, leaf, self.of.geometry(leaf)) if reshaped else view_between(origin, leaf)
            return Alias(self.of.placeholders.index(origin), None, view)
        if reshaped and known.geometry.storage in shared:
            if known.value is not facts(creator).value:
                raise UnsupportedOperatorError("an output is a view of another one whose shape was changed in place")
            return Alias(None, self.position(creator), SAME)
        if known.geometry.storage in shared and (view := view_of_output(creator, leaf)):
            return Alias(None, self.position(creator), view)
        return Value(self.position(leaf))

    def input_of(self, leaf: fx.Node, creator: fx.Node) -> fx.Node:
        """The input that a leaf on an input's storage was made from: itself, or the one its view chain starts at."""
        node = leaf
        while node.op != "placeholder":
            storage = facts(leaf).geometry.storage
            parents = [a for a in _sources(node) if _shares(a, storage)]
            if not parents:
                return creator
            node = parents[0]
        return node

    def position(self, node: fx.Node) -> int:
        new = self.of.read(node)
        if node not in self.positions:
            self.results.append(new)
            self.positions[node] = len(self.results) - 1
        return self.positions[node]


def _storages_with_cells(gm: fx.GraphModule) -> set[int]:
    """Storages that are written, or shown in another shape or with another history in place."""
    cells = {facts(arg).geometry.storage for node in gm.graph.nodes for arg in facts(node).writes}
    return cells | _reshaped(gm) | {facts(arg).geometry.storage for node in gm.graph.nodes for arg in facts(node).cut}


def _strided(gm: fx.GraphModule) -> dict[int, list[Geometry]]:
    """What `as_strided` shows of each storage, which may lie outside of its argument."""
    found: dict[int, list[Geometry]] = {}
    for node in gm.graph.nodes:
        if node.target in ("as_strided", torch.as_strided):
            geometry = facts(node).geometry
            found.setdefault(geometry.storage, []).append(geometry)
    return found


def _lies_in(view: Geometry, base: Geometry) -> bool:
    """Whether a view shows elements of its base only; of another dtype it is taken to."""
    try:
        return view.dtype is not base.dtype or access_of(base, view) is not None
    except OutOfBase:
        return False


def _reshaped(gm: fx.GraphModule) -> set[int]:
    """Storages on which a tensor's shape is changed in place."""
    return {geometry.storage for node in gm.graph.nodes for _, geometry in facts(node).restrided}


def _at(value: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A fake tensor as it was when it lay at a place: itself, unless its shape or history was changed in place since."""
    same_history = value.requires_grad or not geometry.requires_grad
    if same_history and (tuple(value.shape), tuple(value.stride())) == (geometry.size, geometry.stride):
        return value
    with value.fake_mode, torch.inference_mode(False):  # type: ignore[attr-defined]
        then = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device=value.device)
        return then.requires_grad_(geometry.requires_grad)


def _is_used_after(at: fx.Node, node: fx.Node) -> bool:
    return any(at < user for user in node.users)


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node's value may be made of: all of its arguments, or the one that it takes out of a tuple of them."""
    if node.target is operator.getitem and isinstance(node.args[0], (tuple, list)):
        element = node.args[0][node.args[1]]
        return [element] if isinstance(element, fx.Node) else []
    return node.all_input_nodes


def _shares(node: fx.Node, storage: int) -> bool:
    leaves = pytree.tree_leaves(facts(node).value)
    return any(isinstance(leaf, torch.Tensor) and Geometry.of(leaf).storage == storage for leaf in leaves)


def _storages_seen_twice(leaves: list[Any]) -> set[int]:
    seen: dict[int, fx.Node] = {}
    twice = set()
    for leaf in leaves:
        if _is_tensor(leaf):
            storage = facts(leaf).geometry.storage
            if storage in seen and seen[storage] is not leaf:
                twice.add(storage)
            seen[storage] = leaf
    return twice


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or bool(isinstance(value, (tuple, list)) and tensor_leaves(value))


def _is_tensor(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and facts(arg).geometry is not None


def _portable(geometry: Geometry) -> Geometry:
    """Without the address, so that equal graphs have equal text."""
    return geometry._replace(storage=0, requires_grad=False)


def _whole_storage(value: torch.Tensor, sharing: list[Geometry]) -> torch.Tensor:
    """A flat fake tensor over everything from the first to the last element that the inputs on one storage show."""
    if len({g.dtype for g in sharing}) > 1:
        raise UnsupportedOperatorError("inputs that overlap in memory have different dtypes and are written")
    if any(g.requires_grad for g in sharing):
        raise UnsupportedOperatorError("inputs that overlap in memory are written and require gradients")
    ends = [
        g.offset + (1 + sum((n - 1) * s for n, s in zip(g.size, g.stride, strict=True)) if 0 not in g.size else 0)
        for g in sharing
    ]
    first = min(g.offset for g in sharing)
    return value.as_strided((max(ends) - first,), (1,), first)
