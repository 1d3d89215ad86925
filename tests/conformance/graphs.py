"""A sample as a graph of one node, and the functions of its tensors that run it."""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

from pure_backend.backend import assume_pure


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an operator, as a function of its distinct tensors.

    Attributes:
        op: The operator.
        tensors: The distinct tensors among its arguments.
        leaves: The flattened arguments; an `int` number of a tensor wrapped in `Slot` where a tensor stands.
        spec: Their pytree: `(args, kwargs)`.
    """

    op: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def __call__(self, *tensors: Any) -> Any:
        args, kwargs = self.arguments(tensors)
        return self.op(*args, **kwargs)

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple, dict]:
        """The operator's arguments with `tensors` (or nodes) in their places."""
        leaves = [tensors[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a tensor stands among the arguments."""

    index: int


def call_of(op: Callable[..., Any], sample: SampleInput) -> Call:
    """The call that a sample describes."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
    place = {id(tensor): Slot(i) for i, tensor in enumerate(tensors)}
    return Call(op, tuple(tensors), tuple(place.get(id(leaf), leaf) for leaf in leaves), spec)


def twins(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Leaves with the same values, strides, shared storages and gradient flags."""
    storages: dict[int, torch.UntypedStorage] = {}
    return tuple(_twin(tensor, storages) for tensor in tensors)


def _twin(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    plain = tensor.detach()
    storage = plain.untyped_storage()
    copy = storages.setdefault(storage._cdata, storage.clone())
    twin = torch.empty(0, dtype=plain.dtype).set_(copy, plain.storage_offset(), plain.size(), plain.stride())
    twin = torch._neg_view(twin) if plain.is_neg() else twin
    twin = twin.conj() if plain.is_conj() else twin
    return twin.requires_grad_(tensor.requires_grad)


def one_node(call: Call, example: Any) -> fx.GraphModule:
    """The call as Dynamo would write it: placeholders, one `call_function`, and the leaves of `example`, its result."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"t{i}") for i in range(len(call.tensors))]
    args, kwargs = call.arguments(placeholders)
    node = graph.call_function(call.op, args, kwargs)
    graph.output(tuple(_leaves(graph, node, example)))
    return fx.GraphModule({}, graph)


def _leaves(graph: fx.Graph, node: fx.Node, example: Any) -> list[fx.Node]:
    if not isinstance(example, (tuple, list)):
        return [node]
    parts = [graph.call_function(operator.getitem, (node, i)) for i in range(len(example))]
    return [leaf for part, value in zip(parts, example, strict=True) for leaf in _leaves(graph, part, value)]


def is_torch_function(op: Callable[..., Any]) -> bool:
    """Whether a graph can name an operator: the database also holds wrappers of its own, which Dynamo looks into."""
    if isinstance(op, functools.partial):
        return False
    return not isinstance(op, types.FunctionType) or getattr(sys.modules.get(op.__module__), op.__name__, None) is op


def through_backend(call: Call, example: Any) -> Callable[..., list[Any]]:
    """The call given to the backend as a graph of one node; returns the leaves of its result."""
    gm = one_node(call, example)
    compiled: list[Callable[..., Any]] = []

    def run(*tensors):
        if not compiled:
            compiled.append(assume_pure(gm, tensors))
        return list(compiled[0](*tensors))

    return run


def through_dynamo(call: Call) -> Callable[..., list[Any]]:
    """The call under `torch.compile`; returns the leaves of its result."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: call(*tensors), backend="assume_pure")
    return lambda *tensors: pytree.tree_leaves(compiled(*tensors))
