"""One side of a case: what a call showed its caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .latitude import Latitude

COTANGENT_SEED = 7
CALL_SEED = 1


@dataclasses.dataclass(frozen=True)
class Observed:
    """What a call showed.

    Attributes:
        result: What it returned.
        flags: Dtype, shape and `requires_grad` of each leaf of it.
        outputs: The leaves to compare, the undetermined part of them taken out.
        inputs: The tensors it was given, afterwards.
        grads: The gradient of each input that requires one; None where there is none.
    """

    result: Any
    flags: list[Any]
    outputs: list[Any]
    inputs: list[torch.Tensor]
    grads: list[torch.Tensor | None]


def observe(call: Callable[..., Any], tensors: Sequence[torch.Tensor], latitude: Latitude, grad: bool = True) -> Observed:
    """Run a call and its backward.

    Args:
        call: A function of the tensors.
        tensors: Its own copies of the inputs.
        latitude: What of them to compare.
        grad: Whether to take gradients.
    """
    torch.manual_seed(CALL_SEED)
    result = call(*tensors)
    flags = [_flags(leaf) for leaf in pytree.tree_leaves(result)]
    outputs = pytree.tree_leaves(latitude.result(result))
    grads = _gradients(outputs, [t for t in tensors if t.requires_grad and t.is_leaf]) if grad else []
    return Observed(result, flags, outputs, latitude.inputs(tensors), latitude.grads(grads))


def _flags(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf)
    return leaf.dtype, tuple(leaf.shape), leaf.requires_grad


def _gradients(outputs: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients under cotangents that depend on the shapes alone."""
    heads = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not heads or not inputs:
        return []
    generator = torch.Generator().manual_seed(COTANGENT_SEED)
    cotangents = [_cotangent(head, generator) for head in heads]
    return list(torch.autograd.grad(heads, inputs, cotangents, allow_unused=True))


def _cotangent(head: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers that every dtype has, so that double precision is given the same ones."""
    parts = torch.randn((2, *head.shape), generator=generator).bfloat16().float()
    return (torch.complex(*parts) if head.is_complex() else parts[0]).to(head.dtype)
