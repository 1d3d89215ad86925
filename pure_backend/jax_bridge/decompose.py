"""An operator without a lowering, as torch's own graph of ATen operators.

`make_fx` under functionalization gives what the operator is made of, with every write inside it already turned into values and
torch's own shape and dtype on every node. The result depends on shapes and constants only and is kept for repeated layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pure_backend.ir.facts import learn
from pure_backend.ir.positions import with_values
from pure_backend.ir.recorded import aten_graph, followable


@dataclasses.dataclass(frozen=True)
class FakeCall:
    """One call of an operator as a function of its distinct tensors.

    Attributes:
        op: A function, or the name of a Tensor method.
        leaves: The flattened arguments, fake tensors in the place of tensors.
        spec: Their pytree: `(args, kwargs)`.
        writes: Which of the tensors among the leaves the call writes.
        autocast: The autocast regions to run in; the casts they make are in the graph.
        recorded: Whether autograd records the call: what it does not follow inside, because it is detached, is so in the graph.
    """

    op: Callable[..., Any] | str
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    writes: tuple[int, ...] = ()
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    recorded: bool = False

    @functools.cached_property
    def positions(self) -> list[int]:
        """Where tensors are among the leaves."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @functools.cached_property
    def order(self) -> list[int]:
        """For each tensor among the leaves, which of the distinct ones it is."""
        first = distinct([self.leaves[i] for i in self.positions])
        number = {f: n for n, f in enumerate(dict.fromkeys(first))}
        return [number[f] for f in first]

    def unique(self, values: Sequence[Any]) -> list[Any]:
        """Of values for all leaves those of the distinct tensors."""
        found = {n: values[i] for i, n in reversed(list(zip(self.positions, self.order, strict=True)))}
        return [found[n] for n in range(len(found))]

    def arguments(self, unique: Sequence[Any], leaves: Sequence[Any] | None = None) -> tuple[tuple, dict[str, Any]]:
        """The arguments with values for the distinct tensors, the others as they are among `leaves`."""
        values = (unique[n] for n in self.order)
        full = with_values(self.leaves if leaves is None else leaves, self.positions, values)
        return pytree.tree_unflatten(full, self.spec)

    def __call__(self, *unique: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of the result, then the new values of the written tensors."""
        args, kwargs = self.arguments(unique)
        with self.in_autocast():
            result = getattr(args[0], self.op)(*args[1:], **kwargs) if isinstance(self.op, str) else self.op(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return [*results, *(unique[self.order[w]] for w in self.writes)]

    @contextlib.contextmanager
    def in_autocast(self) -> Iterator[None]:
        """The autocast regions of the call, which those of its derivative are not."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
            yield


def decompose(call: FakeCall) -> fx.GraphModule:
    """The ATen graph of one call.

    Returns:
        A graph whose placeholders are the distinct tensors of the call, and whose output is a flat list: the tensors of the
        result, then the new values of the written tensors. Every node has facts.
    """
    tensors = call.unique(call.leaves)
    return traced(call, tensors, recorded=call.recorded and any(tensor.requires_grad for tensor in tensors))


def traced(function: Callable[..., Any], tensors: Sequence[torch.Tensor], recorded: bool = False) -> fx.GraphModule:
    """The ATen graph of a function of tensors of which nothing but shape, strides, dtype and device matters."""
    with FakeTensorMode(), torch.set_grad_enabled(recorded):
        fakes = [followable(tensor) for tensor in tensors]
        return _with_facts(_functional(function, fakes))


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
            learn(node, value=node.meta.get("val"))
    gm.graph.eliminate_dead_code()
    return gm
