"""`assume_pure` and `PureModule`: a function or module traced once per signature, as in torch_xla, on any tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import Unsupported, UserError
from torch.utils import _pytree as pytree

from pure_backend.errors import ImpureFunctionError
from pure_backend.transforms.capture import Captured, captured_for


class ImpureFunctionWarning(UserWarning):
    """A function that was said to be pure does something that no program can hold."""


def assume_pure(fn: Callable[..., Any], *, add_rng_seed_argument: bool = False, check: bool = False) -> Callable[..., Any]:
    """A function that is traced once for each signature, and from then on called as one program.

    Unlike torch_xla's decorator of the same name it works on plain and on `xla` tensors, reads closures and module state afresh
    at every call, writes back what the function writes, gives gradients of any order, and draws fresh random numbers at each
    call that `torch.manual_seed` reproduces.

    Args:
        fn: A function of pytrees of tensors and constants. A new function object with the same code is not traced again.
        add_rng_seed_argument: The returned function takes a keyword `rng_seed` (int): equal seeds give equal random numbers,
            and torch's own generator is left alone.
        check: Before each call, run `fn` twice in eager on copies of the arguments and compare.

    Returns:
        The function to call.

    Raises:
        ImpureFunctionError: With `check`, if the two runs differ or the arguments were changed.

    Example:
        >>> double = assume_pure(lambda x: x * 2)
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    pure = _Pure(fn, captured_for(fn))

    def call(*args: Any, **kwargs: Any) -> Any:
        if check:
            _compare_two_runs(fn, args, kwargs)
        return pure(*args, **kwargs)

    def call_seeded(*args: Any, rng_seed: int, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng_seed)
            return call(*args, **kwargs)

    chosen = call_seeded if add_rng_seed_argument else call
    return functools.wraps(fn)(chosen) if hasattr(fn, "__name__") else chosen


class PureModule(nn.Module):
    """A module whose forward is one program: `assume_pure` of its forward. Parameters and buffers stay the module's own.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        object.__setattr__(self, "_pure", _Pure(module, Captured()))  # no submodule: it would list the module twice

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self._pure(*args, **kwargs)


class _Pure:
    """A function captured whole, or, if Dynamo cannot, in parts, with one warning."""

    def __init__(self, fn: Callable[..., Any], captured: Captured) -> None:
        self.fn = fn
        self.captured = captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.captured(self.fn, *args, **kwargs)
        except (Unsupported, UserError) as error:
            if not self.captured.fullgraph or torch.compiler.is_compiling():
                raise
            warnings.warn(_explanation(self.fn, error), ImpureFunctionWarning, stacklevel=3)
            self.captured = Captured(fullgraph=False)
            return self.captured(self.fn, *args, **kwargs)


def _explanation(fn: Any, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    place = [line for line in lines if line.startswith("File ")]
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return f"{name} is not pure and runs in parts: {lines[0]}" + (f" ({place[-1]})" if place else "")


def _compare_two_runs(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
    copies = [_copied((args, kwargs)) for _ in range(2)]
    results = []
    for own_args, own_kwargs in copies:
        with torch.random.fork_rng(devices=[]):
            results.append(fn(*own_args, **own_kwargs))
    name = getattr(fn, "__qualname__", type(fn).__name__)
    for first, second in zip(*map(pytree.tree_leaves, results), strict=True):
        if not _equal(first, second):
            raise ImpureFunctionError(
                f"{name} is not pure: two calls with equal arguments and random state gave {first} and {second}"
            )
    for before, after in zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(copies[0]), strict=True):
        if not _equal(before, after):
            raise ImpureFunctionError(f"{name} is not pure: it changed an argument from {before} to {after}")


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    return type(a) is type(b) and a == b
