"""Where the arguments of a call lie in memory, as far as its plan depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pure_backend.ir.geometry import ANYWHERE, Placed
from pure_backend.ir.wrapper import Structure, dispatches


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory with strides: sparse ones, nested ones and those that dispatch run in eager whatever their
    shapes are.
    """
    return tensor.layout is torch.strided and not tensor.is_nested and not dispatches(tensor)


def places(args: Sequence[Any], placed: Placed) -> tuple[Any, ...] | None:
    """Where the arguments lie that are `placed`, as far as it matters.

    Returns:
        The offsets of the absolute ones, if there are any; and for each argument that shares memory with one that counts, the
        first one on that memory, the first one on its storage, and how many bytes lie between their first elements.
    """
    if placed == ANYWHERE:
        return None
    args = [a for a in args if not isinstance(a, Structure)]
    offsets = tuple(args[i].storage_offset() for i in sorted(placed.absolute) if i < len(args) and _has_memory(args[i]))
    shared = _shared(args, placed.shared) if placed.shared else None
    return (offsets, shared) if offsets or shared else None


def storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's storage begins and ends. Several storages may show one memory (NumPy's, DLPack's), but on xla."""
    storage = tensor.untyped_storage()
    start = 0 if tensor.is_xla else storage.data_ptr()
    return (start, start + storage.nbytes()) if start else (storage._cdata, storage._cdata + 1)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the first and after the last element of a tensor lie; its storage where that says nothing (xla)."""
    start = tensor.data_ptr() if tensor.numel() and not tensor.is_xla else 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (start, start + (last + 1) * tensor.element_size()) if start else storage_span(tensor)


def overlapping(
    args: Sequence[Any], positions: frozenset[int], where: Callable[[torch.Tensor], tuple[int, int]] = storage_span
) -> list[list[int]]:
    """The arguments that share memory with one of these positions, those on one memory together.

    Args:
        args: The arguments.
        positions: Which of them count.
        where: What a tensor takes of memory: by default all that its storage has.
    """
    end, groups = -1, []
    for (start, after), i in sorted((where(a), i) for i, a in enumerate(args) if _has_memory(a)):
        if start < end:
            groups[-1].append(i)
        else:
            groups.append([i])
        end = max(end, after)
    return [group for group in groups if len(group) > 1 and not positions.isdisjoint(group)]


def _has_memory(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and has_strides(arg)


def _shared(args: Sequence[Any], positions: frozenset[int]) -> tuple[tuple[int, int, int, int], ...] | None:
    found = []
    for group in overlapping(args, positions):
        first = min(group)
        storages = {args[i].untyped_storage()._cdata: i for i in sorted(group, reverse=True)}
        for i in sorted(group):
            storage = args[i].untyped_storage()
            between = 0 if args[i].is_xla else args[i].data_ptr() - args[first].data_ptr()
            found.append((i, first, storages[storage._cdata], between))
    return tuple(found) or None
