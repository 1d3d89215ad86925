"""What eager checks of static arguments, dtypes and shapes, and fake tensors do not.

Fake tensors run Python stand-ins of many operators, which leave out checks that eager's kernels make: `celu(alpha=0)`, a
product of two dtypes, 300 into int8. So each operator that meets fakes also runs once on real tensors of the same dtypes, made
tiny: every size above 1 is 2. (Operators for torch's own use check little, so they are tried only where they are small, as
they are.) What raises there may mind the sizes; what raises with the true sizes too, on zeros as on ones, does not depend on
values. What is found here is a suspicion: the call then runs in eager, which decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_MOST_ELEMENTS = 1 << 22
_MOST_GROWTH = 64
_SIZES = frozenset({"size", "normalized_shape", "input_size", "self_size"})
_MOST_ELEMENTS_AS_THEY_ARE = 1 << 14
_passed: dict[Any, None] = {}
_suspected: dict[str, Any] = {}
_KEPT = 4096


class Suspected(Exception):
    """An operator would probably raise in eager; the message says what."""


def trust(text: str) -> None:
    """Eager did not raise what was suspected: do not suspect such calls again."""
    _passed[_suspected.pop(text, None)] = None


class Checked(TorchDispatchMode):
    """Raises `Suspected` where an operator on fake CPU tensors would raise in eager whatever the values are."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """As torch's own modes: for others torch sets a flag of the process, which threads leave set, and Dynamo then rests."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        call = _Call.of(func, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None and not call.grows(result):
            call.check()
        return result


class _Shape(tuple):
    """Sizes and dtype in the place of a tensor."""

    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        shape = cls(tensor.shape)
        shape.dtype = tensor.dtype
        return shape


class _Call:
    """An operator with shapes in the place of tensors."""

    def __init__(self, func: Any, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.func = func
        self.leaves = leaves
        self.spec = spec
        self.elements = sum(_count(leaf) for leaf in leaves if type(leaf) is _Shape)
        self.smallest = _same if _trusts(func) else _tiny

    @classmethod
    def of(cls, func: Any, args: tuple, kwargs: dict) -> _Call | None:
        """The call, or None if it cannot be repeated."""
        if func.namespace != "aten" or any(argument.name == "pivots" for argument in func._schema.arguments):
            return None  # pivots are taken for rows, unchecked
        if _is_view(func) or _counts_a_mask(func, args) or torch._C._functorch.maybe_current_level() is not None:
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sized = any(argument.name == "size" for argument in func._schema.arguments)
        if not (tensors or sized) or any(isinstance(leaf, (torch.Generator, torch.SymInt)) for leaf in leaves):
            return None
        if any(t.device.type != "cpu" or t.layout is not torch.strided or t.is_quantized for t in tensors):
            return None
        call = cls(func, [_Shape.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        return None if call.smallest is _same and call.elements > _MOST_ELEMENTS_AS_THEY_ARE else call

    def grows(self, result: Any) -> bool:
        """Whether a tiny call might still have a large result."""
        made = sum(t.numel() for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        return made > _MOST_ELEMENTS and made > _MOST_GROWTH * max(self.elements, 1)

    def check(self) -> None:
        """Raise what eager raises."""
        key = (self.func, self.spec, *(self._name(leaf) for leaf in self.leaves))
        if key in _passed:
            return
        error = self.error(self.smallest)
        if error is not None and self.raises_at_any_size(error):
            text = f"{self.func}: {error!r}"
            _suspected[text] = key
            raise Suspected(text) from error
        _passed[key] = None
        while len(_passed) > _KEPT:
            _passed.pop(next(iter(_passed)), None)

    def raises_at_any_size(self, error: Exception) -> bool:
        """Whether a tiny call's error is not of its sizes; too large to try, if it says the same at other sizes."""
        if self.elements > _MOST_ELEMENTS:
            return str(self.error(lambda size: min(size, 3))) == str(error)
        return all(self.error(_same, value) is not None for value in (0, 1))

    @staticmethod
    def _name(leaf: Any) -> Any:
        if type(leaf) is _Shape:
            return (leaf.dtype, *map(_tiny, leaf)) if _count(leaf) > _MOST_ELEMENTS else (leaf.dtype, *leaf)
        return (type(leaf), repr(leaf))

    def error(self, resize: Callable[[int], int], value: int = 0) -> Exception | None:
        """What the operator raises on real tensors, floats of 1 and integers of a value."""
        with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast(), torch.random.fork_rng(devices=[]):
            try:
                leaves = [_real(leaf, resize, value) for leaf in self.leaves]
                args, kwargs = pytree.tree_unflatten(leaves, self.spec)
                self.func(*_resized(self.func, args, resize), **kwargs)
            except torch.linalg.LinAlgError:  # of values
                return None
            except Exception as error:
                return error
        return None


def _tiny(size: int) -> int:
    return min(size, 2)


def _same(size: int) -> int:
    return size


def _trusts(func: Any) -> bool:
    """Whether an operator is for torch's own use, and reads where its caller says: sizes that do not fit end the process."""
    name = func._opname
    return name.startswith(("_", "mkldnn_")) or "_backward" in name


def _count(shape: _Shape) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


def _real(leaf: Any, resize: Callable[[int], int], value: int) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if type(leaf) is not _Shape:
        return leaf
    inexact = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return torch.full([resize(size) for size in leaf], 1 if inexact else value, dtype=leaf.dtype, device="cpu")


def _resized(func: Any, args: tuple, resize: Callable[[int], int]) -> list[Any]:
    """Arguments with the sizes among them resized too."""
    names = [argument.name for argument in func._schema.arguments]
    return [
        [resize(size) for size in arg] if name in _SIZES and isinstance(arg, (list, tuple)) else arg
        for arg, name in zip(args, names, strict=False)
    ]


def _counts_a_mask(func: Any, args: tuple) -> bool:
    """Whether it depends on how many elements of a mask are true, neither none nor all of them, that sizes match."""
    masks = (torch.bool, torch.uint8)
    return "index_put" in func._opname and any(isinstance(i, torch.Tensor) and i.dtype in masks for i in args[1])


def _is_view(func: Any) -> bool:
    """Whether an operator gives a view: fake tensors check all of those."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)
