"""Whether a call is like the one before: asked of all tensors at once, 900 parameters take 0.03 ms."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from pure_backend.calls.places import places
from pure_backend.calls.signature import modes
from pure_backend.ir.exact import exact
from pure_backend.ir.geometry import ANYWHERE, Placed
from pure_backend.ir.wrapper import comes_apart, pieces_of, take_apart


class Guard:
    """Accepts calls whose signature is that of the call it was made of; it may refuse one that is."""

    def __init__(self, args: Sequence[Any], placed: Placed = ANYWHERE) -> None:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self._check = _tensor_check(tensors)
        self._others = tuple(i for i, a in enumerate(args) if not isinstance(a, torch.Tensor))
        self._tensors = tuple(i for i, a in enumerate(args) if isinstance(a, torch.Tensor))
        self._values = self._read(args)
        self._modes = modes()
        self._placed = placed
        self._places_matter = placed != ANYWHERE
        self._places = places(args, placed)

    def __call__(self, args: Sequence[Any]) -> bool:
        """Whether the arguments and modes are as they were."""
        tensors = [args[i] for i in self._tensors] if self._others else args
        return (
            self._check(*tensors)
            and modes() == self._modes
            and (not self._others or self._read(args) == self._values)
            and (not self._places_matter or places(args, self._placed) == self._places)
        )

    def _read(self, args: Sequence[Any]) -> list[Hashable]:
        return [exact(args[i]) for i in self._others]


class WrapperGuard:
    """A `Guard` of calls with wrapper subclasses among the arguments: of their structures and their plain tensors."""

    def __init__(self, args: Sequence[Any], placed: Placed = ANYWHERE) -> None:
        self._structures = [take_apart(a)[1] if comes_apart(a) else None for a in args]
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
    return (WrapperGuard if any(map(comes_apart, args)) else Guard)(args, placed)


def _tensor_check(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """A check, in C++, that tensors have the types, dtypes, devices, sizes, strides and gradient flags of these.

    It is the one of Dynamo's guards. It refuses a tensor that is given twice, and one under another dispatch mode.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes, strides = [list(tensor.size()) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
