"""Wrapper subclasses: tensors that are plain tensors and a rule, `__torch_dispatch__`, of what an operator does to them.

Law: `structure.wrap(pieces)` of `pieces, structure = take_apart(tensor)` is a tensor that stands for what `tensor` stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pure_backend.ir.exact import Same, exact
from pure_backend.ir.layout import is_distributed


def dispatches(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class with a `__torch_dispatch__` of its own: what its storage holds is not its value."""
    cls = type(tensor)
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not issubclass(cls, FakeTensor)


@dataclasses.dataclass(frozen=True)
class Structure:
    """All of a wrapper but its plain tensors; equal structures are wrapped equally.

    Attributes:
        cls: The class.
        names: The attributes that hold tensors.
        inner: For each of them its structure if it is a wrapper too, else None.
        context: What the class keeps besides, as `__tensor_flatten__` gives it.
        size: The size that the wrapper shows.
        stride: The stride that it shows.
        requires_grad: Whether it requires grad.
        identity: The context as a value that can be compared.
    """

    cls: type
    names: tuple[str, ...]
    inner: tuple[Structure | None, ...]
    context: Any = dataclasses.field(compare=False)
    size: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool
    identity: Any

    @property
    def count(self) -> int:
        """How many plain tensors there are, those of inner wrappers counted."""
        return sum(1 if inner is None else inner.count for inner in self.inner)

    def fits(self, tensor: Any) -> bool:
        """Whether a value is taken apart like this; of plain tensors in it nothing is asked. To be called like `pieces`."""
        if type(tensor) is not self.cls:
            return False
        names, context = tensor.__tensor_flatten__()
        return (
            tuple(names) == self.names
            and _same(context, self.context)
            and (tensor.shape, tensor.stride(), tensor.requires_grad) == (self.size, self.stride, self.requires_grad)
            and all(s.fits(getattr(tensor, name)) for name, s in zip(names, self.inner, strict=True) if s is not None)
        )

    def pieces(self, tensor: torch.Tensor) -> list[Any]:
        """The plain tensors of a wrapper that fits; under `DisableTorchFunctionSubclass`, or each look at it is a call."""
        found: list[Any] = []
        for name, structure in zip(self.names, self.inner, strict=True):
            value = getattr(tensor, name)
            found += [value] if structure is None else structure.pieces(value)
        return found

    def wrap(self, pieces: Iterator[torch.Tensor]) -> torch.Tensor:
        """The wrapper of the next `count` of these."""
        tensors = {n: next(pieces) if s is None else s.wrap(pieces) for n, s in zip(self.names, self.inner, strict=True)}
        wrapper: Any = self.cls
        wrapped = wrapper.__tensor_unflatten__(tensors, self.context, self.size, self.stride)
        return wrapped.requires_grad_() if self.requires_grad else wrapped


@dataclasses.dataclass(frozen=True)
class Distributed(Structure):
    """All of a DTensor but its local tensor. Its context is the mesh and the placements."""

    @classmethod
    def of(cls, tensor: Any) -> Distributed:
        """The structure of a DTensor."""
        context = (tensor.device_mesh, tensor.placements)
        place = tensor.shape, tensor.stride(), tensor.requires_grad
        return cls(type(tensor), ("_local_tensor",), (None,), context, *place, _identity(context))

    def fits(self, tensor: Any) -> bool:
        """As for any structure."""
        return (
            type(tensor) is self.cls
            and (tensor.device_mesh, tensor.placements) == self.context
            and (tensor.shape, tensor.stride(), tensor.requires_grad) == (self.size, self.stride, self.requires_grad)
        )


def comes_apart(value: Any) -> bool:
    """Whether a value is a structure and plain tensors to whoever compares calls."""
    return is_distributed(value) or is_wrapper(value)


def take_apart(tensor: torch.Tensor) -> tuple[list[torch.Tensor], Structure]:
    """The plain tensors of a wrapper, those of wrappers in it too, and the rest."""
    with torch._C.DisableTorchFunctionSubclass():  # which every look at an attribute would call
        return _take_apart(tensor)


def _take_apart(tensor: Any) -> tuple[list[torch.Tensor], Structure]:
    if is_distributed(tensor):
        return [tensor._local_tensor], Distributed.of(tensor)
    names, context = tensor.__tensor_flatten__()
    pieces: list[torch.Tensor] = []
    inner: list[Structure | None] = []
    for name in names:
        value = getattr(tensor, name)
        own, structure = _take_apart(value) if dispatches(value) else ([value], None)
        pieces += own
        inner.append(structure)
    place = tensor.shape, tensor.stride(), tensor.requires_grad
    return pieces, Structure(type(tensor), tuple(names), tuple(inner), _copied(context), *place, _identity(context))


def pieces_of(values: Sequence[Any]) -> list[Any]:
    """The values with the pieces of each wrapper in its place."""
    return [piece for value in values for piece in (take_apart(value)[0] if comes_apart(value) else (value,))]


def spread(values: Sequence[Any]) -> list[Any]:
    """The values with each wrapper's structure, and then its pieces, in its place: all that a plan depends on."""
    return [part for value in values for part in (_parts(value) if comes_apart(value) else (value,))]


def _parts(wrapper: torch.Tensor) -> list[Any]:
    pieces, structure = take_apart(wrapper)
    return [structure, *pieces]


def is_wrapper(value: Any) -> bool:
    """Whether a value is a wrapper that can be taken apart."""
    return isinstance(value, torch.Tensor) and dispatches(value) and not why_whole(value)


def why_whole(tensor: torch.Tensor) -> str:
    """Why a tensor that dispatches cannot be taken apart, or an empty string."""
    with torch._C.DisableTorchFunctionSubclass():
        return _why_whole(tensor)


def _why_whole(tensor: Any) -> str:
    if not is_traceable_wrapper_subclass(tensor):
        return "without __tensor_flatten__"
    if type(tensor).__module__.startswith("torch.distributed"):
        return "whose operators communicate"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "without strides"
    values = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return "that holds more than tensors"
    if any(value.requires_grad for value in values):
        return "whose inner tensors require grad"
    return next((why for value in values if dispatches(value) and (why := _why_whole(value))), "")


def _copied(context: Any) -> Any:
    """A context that does not change when the wrapper's own does."""
    if type(context) is dict:
        return {key: _copied(value) for key, value in context.items()}
    return type(context)(map(_copied, context)) if type(context) in (list, tuple) else context


def _same(a: Any, b: Any) -> bool:
    """Whether two contexts are alike, quickly; it may say no where they are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a) is dict:
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    return _identity(a) == _identity(b)


def _identity(value: Any) -> Any:
    """A value that can be hashed and is equal for equal contexts only; what cannot be hashed equals itself only."""
    if isinstance(value, dict):
        return (type(value), tuple((_identity(key), _identity(part)) for key, part in value.items()))
    if type(value) in (list, tuple):
        return (type(value), tuple(map(_identity, value)))
    if isinstance(value, torch.Tensor):
        return Same(value)
    try:
        return exact(value)
    except TypeError:
        return Same(value)
