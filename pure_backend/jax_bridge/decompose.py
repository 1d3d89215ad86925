"""An operator without a lowering, as torch's own graph of ATen operators.

`make_fx` under functionalization gives what the operator is made of, with every write inside it already turned into values and
torch's own shape and dtype on every node. The result depends on shapes and constants only and is kept for repeated layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pure_backend.ir.facts import Facts
from pure_backend.ir.recorded import aten_graph, followable


def decompose(
    op: Callable[..., Any] | str,
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    writes: tuple[int, ...],
    autocast: tuple[tuple[str, torch.dtype], ...],
    recorded: bool,
) -> fx.GraphModule:
    """The ATen graph of one call.

    Args:
        op: A function, or the name of a Tensor method.
        leaves: The flattened arguments, fake tensors in the place of tensors.
        spec: Their pytree: `(args, kwargs)`.
        writes: Which of the tensors among the leaves the call writes.
        autocast: The autocast regions to run in; the casts they make are in the graph.
        recorded: Whether autograd records the call: what it does not follow inside, because it is detached, is so in the graph.

    Returns:
        A graph whose placeholders are the tensors among `leaves` in order, a tensor that stands there twice once, and whose
        output is a flat list: the tensors of the result, then the new values of the written tensors. Every node has `Facts`.
    """
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    order = distinct([leaves[i] for i in positions])
    mode = FakeTensorMode()
    recorded = recorded and any(leaves[i].requires_grad for i in positions)
    with mode, torch.set_grad_enabled(recorded):
        fakes = [followable(leaves[positions[first]]) for first in dict.fromkeys(order)]
    number = {first: n for n, first in enumerate(dict.fromkeys(order))}

    def call(*unique):
        full = list(leaves)
        tensors = [unique[number[first]] for first in order]
        for i, tensor in zip(positions, tensors, strict=True):
            full[i] = tensor
        args, kwargs = pytree.tree_unflatten(full, spec)
        result = getattr(args[0], op)(*args[1:], **kwargs) if isinstance(op, str) else op(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return [*results, *(tensors[w] for w in writes)]

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(recorded))
        stack.enter_context(mode)
        for device, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        return _with_facts(_functional(call, fakes))


def _functional(call: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> fx.GraphModule:
    try:
        return aten_graph(torch.func.functionalize(call, remove="mutations_and_views"), fakes)
    except RuntimeError as error:
        if "does not support automatic differentiation" not in str(error):
            raise
    # torch 2.9 has no derivative of the copy that functionalization puts in the place of `conj`; the view itself has one
    return aten_graph(torch.func.functionalize(call, remove="mutations"), fakes)


def distinct(values: Sequence[Any]) -> list[int]:
    """For each value the position of the first one that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(value), i) for i, value in enumerate(values)]


def torch_decomposition(op: Any) -> Callable[..., Any] | None:
    """Torch's registered decomposition of an ATen operator, or None."""
    return decomposition_table.get(op)


def _with_facts(gm: fx.GraphModule) -> fx.GraphModule:
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            gm.graph.erase_node(node)  # the write-back of an input: its value is an output as well
        else:
            node.meta["facts"] = Facts.of(node.meta.get("val"))
    gm.graph.eliminate_dead_code()
    return gm
