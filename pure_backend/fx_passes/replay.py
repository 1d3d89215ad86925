"""How an output that shares memory with an input or another output is made again outside the program."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.ir.facts import facts
from pure_backend.ir.geometry import Geometry
from pure_backend.ir.views import OutOfBase, access_of


@dataclasses.dataclass(frozen=True)
class View:
    """Makes a view from its origin with ordinary torch calls, so that autograd sees an ordinary view.

    Attributes:
        chain: The graph's own view calls as a module, or None where the view is the origin itself or `strided` is used.
        strided: Size, stride and offset for `as_strided`, where the calls cannot be replayed.
        detach: Whether the view carries no gradient although its origin does.
    """

    chain: fx.GraphModule | None
    strided: tuple[tuple[int, ...], tuple[int, ...], int] | None
    detach: bool

    def __call__(self, origin: torch.Tensor) -> torch.Tensor:
        if self.chain is not None:
            origin = self.chain(origin)
        elif self.strided is not None:
            origin = origin.as_strided(*self.strided)
        return origin.detach() if self.detach else origin


def view_between(origin: fx.Node, node: fx.Node) -> View:
    """The view that makes `node` from `origin`; both lie on one storage."""
    start, end = facts(origin).geometry, facts(node).geometry
    path = _path(origin, node)
    detach = start.requires_grad and not facts(node).value.requires_grad
    if path == [] or (path is None and start.same_place(end)):
        return View(None, None, detach)
    if path is None:
        return View(None, (end.size, end.stride, end.offset), detach)
    return View(_chain(origin, path), None, detach)


def view_by_strides(origin: fx.Node, node: fx.Node, place: Geometry) -> View:
    """The view of `origin` at a place: where `node` lies after its shape was changed."""
    detach = facts(origin).geometry.requires_grad and not facts(node).value.requires_grad
    return View(None, (place.size, place.stride, place.offset), detach)


SAME = View(None, None, False)
"""The origin itself."""


def view_of_output(origin: fx.Node, node: fx.Node) -> View | None:
    """The view from a program output, which is contiguous, to `node`; None where there is no such view."""
    start, end = facts(origin).geometry, facts(node).geometry
    if _path(origin, node) is not None or start.same_place(end):
        return view_between(origin, node)
    try:
        access_of(start, end)
    except OutOfBase:
        return None
    contiguous = facts(origin).value.is_contiguous() and start.dtype == end.dtype
    return view_between(origin, node) if contiguous else None


def _path(origin: fx.Node, node: fx.Node) -> list[fx.Node] | None:
    """The calls from `origin` to `node`, or None where one of them cannot be repeated on the origin alone."""
    storage = facts(origin).geometry.storage
    path: list[fx.Node] = []
    while node is not origin:
        parents = [arg for arg in node.all_input_nodes if _on_storage(arg, storage)]
        others = [arg for arg in node.all_input_nodes if arg not in parents and _has_tensor(arg)]
        if len(parents) != 1 or others or facts(node).restrided or facts(node).cut:
            return None
        if not facts(node).writes:  # a write returns its argument: nothing to repeat
            path.append(node)
        elif (geometry := facts(node).geometry) is None or not geometry.same_place(facts(parents[0]).geometry):
            return None  # without a geometry: the list that an operator on lists returns
        node = parents[0]
    return path[::-1]


def _chain(origin: fx.Node, path: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    current = graph.placeholder("origin")

    def argument(arg: fx.Node) -> Any:
        value = facts(arg).value
        return current if _has_tensor(arg) else value

    for node in path:
        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        current = graph.create_node(node.op, node.target, args, kwargs)
    graph.output(current)
    return fx.GraphModule(torch.nn.Module(), graph)


def _has_tensor(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(facts(node).value))


def _on_storage(node: fx.Node, storage: int) -> bool:
    leaves = pytree.tree_leaves(facts(node).value)
    return any(isinstance(leaf, torch.Tensor) and Geometry.of(leaf).storage == storage for leaf in leaves)
