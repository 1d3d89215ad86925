"""The operators that passes put into a graph, with their meaning in plain torch.

The torch bodies are the reference: a graph after the pass still runs in torch and computes what it computed before. The JAX
lowerings of the same functions are in `jax_bridge/lowerings/views.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pure_backend.ir.geometry import Geometry


def read_view(value: torch.Tensor, base: Geometry, view: Geometry) -> torch.Tensor:
    """The elements that `view` shows when its base has this value."""
    return _as_view(_lay_out(value, base), view).clone()


def write_view(value: torch.Tensor, new: torch.Tensor, base: Geometry, view: Geometry) -> torch.Tensor:
    """The value of the base after `new` was written through `view`."""
    memory = _lay_out(value, base)
    _as_view(memory, view).copy_(new)
    return _as_view(memory, base).clone()


@dataclasses.dataclass(frozen=True)
class Functionalized:
    """A writing operator as a function: called with the same arguments, it gives `(result, *new values of the written ones)`.

    Attributes:
        op: The function, or the name of a Tensor method.
        writes: Which of the tensors among the flattened arguments are written.
    """

    op: Callable[..., Any] | str
    writes: tuple[int, ...]

    __name__ = "functionalized"  # fx prints a node's target by name

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for position in positions:
            leaves[position] = leaves[position].clone()
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = getattr(args[0], self.op)(*args[1:], **kwargs) if isinstance(self.op, str) else self.op(*args, **kwargs)
        return (result, *(leaves[positions[w]] for w in self.writes))


def keep_gradient(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The value of `new` with the gradient of `old`: what a write that autograd does not record leaves behind."""
    kept: Any = _KeepGradient.apply(new, old)
    return kept


class _KeepGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, new, old):
        return new.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def saved(value: torch.Tensor) -> torch.Tensor:
    """A value that a checkpointed body keeps for its backward."""
    return value


Axes = tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], str]
"""A mesh in a graph: sizes and names of its axes, the ranks, their kind of device. See `ir/layout.py`."""


def constrain(value: torch.Tensor, mesh: Axes, cuts: tuple[int | None, ...]) -> torch.Tensor:
    """A value that lies on a mesh in a certain way."""
    return value.clone()


def stored(value: torch.Tensor, mesh: Axes, cuts: tuple[int | None, ...], used: tuple[int | None, ...]) -> torch.Tensor:
    """A parameter that is kept cut in one way and used in another; its gradient lies as it is kept."""
    return value.clone()


def _lay_out(value: torch.Tensor, base: Geometry) -> torch.Tensor:
    """Memory that holds `value` where the base lies in its storage."""
    extent = base.offset + 1 + sum((n - 1) * s for n, s in zip(base.size, base.stride, strict=True) if n)
    memory = torch.zeros(extent, dtype=base.dtype, device=value.device)
    memory.as_strided(base.size, base.stride, base.offset).copy_(value)
    return memory


def _as_view(memory: torch.Tensor, view: Geometry) -> torch.Tensor:
    if view.dtype != memory.dtype:
        if memory.dtype.is_complex:
            memory = torch.view_as_real(memory).reshape(-1)
        elif view.dtype.is_complex:
            memory = torch.view_as_complex(memory[: memory.numel() // 2 * 2].reshape(-1, 2))
        else:
            memory = memory.view(view.dtype)
    tensor = memory.as_strided(view.size, view.stride, view.offset)
    tensor = tensor.conj() if view.conj else tensor
    return torch._neg_view(tensor) if view.neg else tensor
