"""What a call's plan depends on: the metadata of its arguments and the modes it runs in.

`signature` names it in full, to find a plan among many. `Guard` asks one thing, whether a call is like the one before, and
asks it of all tensors at once: 900 parameters take 0.03 ms where their signature takes 0.5 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from pure_backend import _compat
from pure_backend.ir.exact import exact
from pure_backend.ir.geometry import ANYWHERE, Placed
from pure_backend.ir.wrapper import Structure, dispatches, is_wrapper, pieces_of, spread, take_apart


def signature(args: Sequence[Any], placed: Placed = ANYWHERE) -> tuple[Any, ...]:
    """Everything about a call that its plan depends on.

    Args:
        args: The arguments.
        placed: Those of them whose place in memory matters, counted without the structures of wrappers.
    """
    args = spread(args)
    seen = [_seen(a) if isinstance(a, torch.Tensor) else exact(a) for a in args]
    return (*seen, *_modes(), places(args, placed))


def _seen(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = (tensor.shape, tensor.stride()) if has_strides(tensor) else (tensor.layout, tensor.is_nested)
    return (*place, tensor.dtype, tensor.requires_grad, tensor.device, _kind(tensor))


def _kind(tensor: torch.Tensor) -> tuple[type, int]:
    """The class of a tensor, and what sort it is for torch's dispatcher: conjugated, negated, of inference mode, batched."""
    return type(tensor), torch._C._dispatch_keys(tensor).raw_repr()


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory with strides: sparse ones, nested ones and those that dispatch run in eager whatever their
    shapes are.
    """
    return tensor.layout is torch.strided and not tensor.is_nested and not dispatches(tensor)


class Guard:
    """Accepts calls whose signature is that of the call it was made of; it may refuse one that is."""

    def __init__(self, args: Sequence[Any], placed: Placed = ANYWHERE) -> None:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self._check = _compat.tensor_check(tensors)
        self._others = tuple(i for i, a in enumerate(args) if not isinstance(a, torch.Tensor))
        self._tensors = tuple(i for i, a in enumerate(args) if isinstance(a, torch.Tensor))
        self._values = self._read(args)
        self._modes = _modes()
        self._placed = placed
        self._places_matter = placed != ANYWHERE
        self._places = places(args, placed)

    def __call__(self, args: Sequence[Any]) -> bool:
        """Whether the arguments and modes are as they were."""
        tensors = [args[i] for i in self._tensors] if self._others else args
        return (
            self._check(*tensors)
            and _modes() == self._modes
            and (not self._others or self._read(args) == self._values)
            and (not self._places_matter or places(args, self._placed) == self._places)
        )

    def _read(self, args: Sequence[Any]) -> list[Hashable]:
        return [exact(args[i]) for i in self._others]


class WrapperGuard:
    """A `Guard` of calls with wrapper subclasses among the arguments: of their structures and their plain tensors."""

    def __init__(self, args: Sequence[Any], placed: Placed = ANYWHERE) -> None:
        self._structures = [take_apart(a)[1] if is_wrapper(a) else None for a in args]
        self._guard = Guard(pieces_of(args), placed)

    def __call__(self, args: Sequence[Any]) -> bool:
        """Whether the arguments and modes are as they were."""
        plain: list[Any] = []
        with torch._C.DisableTorchFunctionSubclass():
            for structure, arg in zip(self._structures, args, strict=True):
                if structure is None:
                    plain.append(arg)
                elif structure.fits(arg):
                    plain += structure.pieces(arg)
                else:
                    return False
        return self._guard(plain)


def guard_of(args: Sequence[Any], placed: Placed = ANYWHERE) -> Guard | WrapperGuard:
    """A guard of calls like this one."""
    return (WrapperGuard if any(map(is_wrapper, args)) else Guard)(args, placed)


def places(args: Sequence[Any], placed: Placed) -> tuple[Any, ...] | None:
    """Where the arguments lie that are `placed`, as far as it matters.

    Returns:
        The offsets of the absolute ones, if there are any; and for each argument that shares memory with one that counts, the
        first one on that memory, the first one on its storage, and how many bytes lie between their first elements.
    """
    if placed == ANYWHERE:
        return None
    args = [a for a in args if type(a) is not Structure]
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


MODES = ("grad mode", "default dtype", "float32 matmul precision", "JAX's settings", "forward-mode level", "autocast")
"""What `_modes` names, in order."""


def _modes() -> tuple[Any, ...]:
    """Process- and thread-wide modes that change what a graph computes."""
    autocast = ()
    if torch._C._is_any_autocast_enabled():
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda", "xla") if torch.is_autocast_enabled(kind)
        )
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        _compat.float32_matmul_precision(),
        _compat.jax_settings(),
        forward_ad._current_level,
        autocast,
    )
