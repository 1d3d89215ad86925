"""Thread-wide modes: recording of gradients and autocast, which nodes may change, and hooks on saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

AUTOCAST_DEVICES = ("cpu", "cuda", "xla")


@contextlib.contextmanager
def modes_kept() -> Iterator[None]:
    """Put the caller's grad and autocast modes back, also when a node raises inside a region it had opened."""
    grad = torch.is_grad_enabled()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DEVICES]
    nesting = torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad)
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        while torch.autocast_decrement_nesting() >= nesting:
            pass


def no_autocast() -> contextlib.AbstractContextManager[Any]:
    """A scope in which no device's autocast is on."""
    stack = contextlib.ExitStack()
    for kind in AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


@contextlib.contextmanager
def saved_tensors_unseen() -> Iterator[None]:
    """Hide what is saved inside from the user's hooks on saved tensors.

    The fake tensors of a trace are nobody's saved tensors: `torch.utils.checkpoint` counts what its hooks see, in the forward
    and when it computes again.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def hooks_on_saved_tensors() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def save_an_empty_tensor() -> None:
    """Let the hooks on saved tensors, if there are any, see one more.

    A checkpoint stops to compute again, by an error, at the last tensor that the forward saved; what a compiled function writes
    after its program has to be done by then, since eager writes it again.
    """
    if hooks_on_saved_tensors() and torch.is_grad_enabled():
        torch.empty(0, requires_grad=True).exp()
