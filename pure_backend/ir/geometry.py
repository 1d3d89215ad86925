"""Where a tensor lies in its storage, as plain data."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch


class Geometry(NamedTuple):
    """A tensor's place in memory, without the tensor.

    Two tensors with the same `storage` share memory. `size`, `stride` and `offset` count elements of `dtype`.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Geometry of a (fake) tensor; `storage` identifies it only while that tensor lives."""
        return cls(
            tensor.untyped_storage()._cdata,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def place(self) -> tuple:
        """What decides which elements the tensor shows, in which order, and how they are read."""
        return (self.storage, self.size, self.stride, self.offset, self.dtype, self.conj, self.neg)

    @property
    def overlaps_itself(self) -> bool:
        """Whether it may show an element of memory twice, as expanded tensors and windows do; a few that do not count too."""
        reach = 0
        for stride, n in sorted((stride, n) for n, stride in zip(self.size, self.stride, strict=True) if n > 1):
            if stride <= reach:
                return 0 not in self.size
            reach += (n - 1) * stride
        return False

    def same_place(self, other: Geometry) -> bool:
        """Whether both show the same elements in the same order."""
        if self.storage != other.storage or self.size != other.size or self.dtype != other.dtype:
            return False
        if (self.conj, self.neg, self.offset) != (other.conj, other.neg, other.offset):
            return False
        # The stride of a dimension of one element says nothing (jax issue 25066).
        return all(a == b for n, a, b in zip(self.size, self.stride, other.stride, strict=True) if n != 1)


@dataclasses.dataclass(frozen=True)
class Placed:
    """The inputs of a graph whose place in memory decides what it computes, by position.

    Attributes:
        shared: Where it matters with whom they share memory, and where they lie in it: those that are written.
        absolute: Where their offset in their storage matters too: `as_strided` counts from the beginning of the storage.
    """

    shared: frozenset[int] = frozenset()
    absolute: frozenset[int] = frozenset()

    def __or__(self, other: Placed) -> Placed:
        return Placed(self.shared | other.shared, self.absolute | other.absolute)


ANYWHERE = Placed()
"""No argument's place matters."""
