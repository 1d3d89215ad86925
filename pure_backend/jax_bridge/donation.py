"""Buffers of `xla` tensors that the next execution may reuse."""

from __future__ import annotations

import torch

from pure_backend import _compat


def donate_buffer(tensor: torch.Tensor) -> bool:
    """Let the next execution reuse an `xla` tensor's memory, if it has memory of its own; whether it does.

    A lazy `clone()` or view has none before the next sync: torch_xla would give away the memory of the tensor it was made from.
    """
    if tensor.device.type != "xla":
        return False
    bindings = _compat.torch_xla()._XLAC
    own = "XLAData: None" not in bindings._get_xla_tensor_debug_info(tensor)
    return own and bindings._set_buffer_donation(tensor, True)
