"""What a call's plan depends on: the metadata of its arguments and the modes it runs in.

A signature names it in full, to find a plan among many: 900 parameters take 0.5 ms. `guard` only tells like from unlike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from pure_backend import _compat
from pure_backend.calls.places import has_strides, places
from pure_backend.ir.exact import exact
from pure_backend.ir.geometry import ANYWHERE, Placed
from pure_backend.ir.wrapper import spread


def signature(args: Sequence[Any], placed: Placed = ANYWHERE) -> tuple[Any, ...]:
    """Everything about a call that its plan depends on.

    Args:
        args: The arguments.
        placed: Those of them whose place in memory matters, counted without the structures of wrappers.
    """
    args = spread(args)
    seen = [_seen(a) if isinstance(a, torch.Tensor) else exact(a) for a in args]
    return (*seen, *modes(), places(args, placed))


def _seen(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = (tensor.shape, tensor.stride()) if has_strides(tensor) else (tensor.layout, tensor.is_nested)
    return (*place, tensor.dtype, tensor.requires_grad, tensor.device, _kind(tensor))


def _kind(tensor: torch.Tensor) -> tuple[type, int]:
    """The class of a tensor, and what sort it is for torch's dispatcher: conjugated, negated, of inference mode, batched."""
    return type(tensor), torch._C._dispatch_keys(tensor).raw_repr()


MODES = ("grad mode", "default dtype", "float32 matmul precision", "JAX's settings", "forward-mode level", "autocast")
"""What `modes` names, in order."""


def modes() -> tuple[Any, ...]:
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
