"""The thread-wide modes that nodes of a graph may change: recording of gradients, and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
