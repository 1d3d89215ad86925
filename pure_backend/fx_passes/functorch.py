"""`torch.func` transforms inside a graph: each stretch between entering a level and leaving it becomes one node.

Before: `_vmap_increment_nesting(3); %a = _add_batch_dim(x, 0, 1); ...; %r = _remove_batch_dim(...); _vmap_decrement_nesting()`
After:  `%region = Region(gm)(x); %r = region[0]`; when it is propagated, its ATen graph, which knows no levels, is its body.

A call of a user's own function that Dynamo did not look into is such a node too: what it writes and detaches shows in its body.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.ir.facts import derive
from pure_backend.ir.positions import with_values
from pure_backend.ir.recorded import aten_graph, followable
from pure_backend.ir.region import Region


def group_regions(gm: fx.GraphModule) -> None:
    """Replace every stretch that enters and leaves functorch's levels by a `Region` node, in place."""
    nodes = list(gm.graph.nodes)
    for first, last in _stretches(nodes):
        _replace(gm, nodes[first : last + 1])


def _stretches(nodes: list[fx.Node]) -> list[tuple[int, int]]:
    """The first and the last node of each stretch.

    The function from `torch.func.vjp` differentiates values of a level already left: the stretch extends to its call.
    """
    place = {node: i for i, node in enumerate(nodes)}
    spans, depth, entered = [], 0, 0
    for i, node in enumerate(nodes):
        name = getattr(node.target, "__name__", "")
        if name.endswith("_increment_nesting"):
            entered = entered if depth else i
            depth += 1
        elif name.endswith("_decrement_nesting"):
            depth -= 1
            spans += [] if depth else [(entered, i)]
        elif name == "_autograd_grad":
            spans.append((min(place[arg] for part in node.args[:2] for arg in part if isinstance(arg, fx.Node)), i))
    stretches: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if stretches and first <= stretches[-1][1]:
            first, last = stretches[-1][0], max(last, stretches.pop()[1])
        stretches.append((first, last))
    return stretches


def _replace(gm: fx.GraphModule, stretch: list[fx.Node]) -> None:
    inside = set(stretch)
    inputs = list(dict.fromkeys(arg for node in stretch for arg in node.all_input_nodes if arg not in inside))
    outputs = [node for node in stretch if any(user not in inside for user in node.users)]
    graph, env = fx.Graph(), {}
    for arg in inputs:
        env[arg] = graph.placeholder(arg.name)
    for node in stretch:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in outputs))
    with gm.graph.inserting_after(stretch[-1]):
        region = derive(gm.graph.call_function(Region(fx.GraphModule(gm, graph)), tuple(inputs)), stretch[0])
    for position, node in reversed(list(enumerate(outputs))):
        with gm.graph.inserting_after(region):
            result = derive(gm.graph.call_function(operator.getitem, (region, position)), region)
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(stretch):
        gm.graph.erase_node(node)


def open_functions(gm: fx.GraphModule) -> None:
    """Make calls of the user's own functions (`torch._dynamo.allow_in_graph`) regions, in place."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and _is_users(node.target):
            node.target = Region(node.target)


def _is_users(target: Any) -> bool:
    if not isinstance(target, types.FunctionType) or getattr(target, "pure_backend_impure", False):
        return False
    return target.__module__.split(".")[0] not in ("torch", "torch_xla", "pure_backend")


def propagate_region(
    region: Region, args: tuple, kwargs: dict, run_body: Callable[..., Any]
) -> tuple[Any, tuple[fx.GraphModule, ...]]:
    """The region's results on fake arguments, and its propagated ATen graph, whose placeholders are the tensors among them."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    given = [leaves[i] for i in positions]
    structure: list[Any] = []

    def call(*tensors):
        args, kwargs = pytree.tree_unflatten(with_values(leaves, positions, tensors), spec)
        results, results_spec = pytree.tree_flatten(region(*args, **kwargs))
        structure[:] = [results_spec]
        return tuple(results)

    with _levels_kept():  # in the caller's grad mode, which torch.func.grad needs
        gm = aten_graph(call, [followable(tensor) for tensor in given])
    copy, value = run_body(gm, given)
    return pytree.tree_unflatten(list(value), structure[0]), (copy,)


@contextlib.contextmanager
def _levels_kept() -> Iterator[None]:
    """Leave functorch's levels as they were, also when a node raises between entering one and leaving it."""
    before = torch._C._functorch.maybe_current_level() or 0
    try:
        yield
    finally:
        while (torch._C._functorch.maybe_current_level() or 0) > before:
            torch._C._functorch.pop_dynamic_layer_stack()
