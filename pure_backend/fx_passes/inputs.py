"""The inputs of one call: checked, and as fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pure_backend.errors import DeviceError, UnsupportedOperatorError
from pure_backend.ir.describe import describe_tensor


def check_inputs(gm: fx.GraphModule, args: Sequence[Any]) -> str:
    """The device type on which a call's tensors lie.

    Raises:
        DeviceError: Tensors lie on two devices; a CPU tensor of one element beside an accelerator is allowed, as in eager.
        UnsupportedOperatorError: A sparse, quantized or nested tensor.
    """
    placeholders = gm.graph.find_nodes(op="placeholder", sort=True)
    tensors = [(p, a) for p, a in zip(placeholders, args, strict=True) if isinstance(a, torch.Tensor)]
    for placeholder, tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
            raise UnsupportedOperatorError(
                f"argument {argument_name(placeholder)!r} is a {kind} tensor of shape {tuple(tensor.shape)}: JAX programs "
                "take dense tensors; convert it (.to_dense(), .dequantize()) or leave this part out of torch.compile"
            )
    placed = [(p, t) for p, t in tensors if t.ndim or t.device.type != "cpu"]
    devices = {tensor.device for _, tensor in placed} or {tensor.device for _, tensor in tensors}
    if len(devices) > 1:
        shown = ", ".join(f"{argument_name(p)}: {describe_tensor(t)} on {t.device}" for p, t in _one_a_device(placed))
        raise DeviceError(f"the arguments of a compiled graph lie on several devices ({shown}): move them to one")
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda", "xla"):
        name = argument_name(tensors[0][0])
        raise DeviceError(f"argument {name!r} lies on {device}: this backend runs on cpu, cuda and xla tensors")
    return device.type


def _one_a_device(placed: list[tuple[fx.Node, torch.Tensor]]) -> list[tuple[fx.Node, torch.Tensor]]:
    return list({tensor.device: (node, tensor) for node, tensor in reversed(placed)}.values())


def argument_name(placeholder: fx.Node) -> str:
    """The user's name of a graph input: `L_self_parameters_weight_` is `self_parameters_weight`."""
    return str(placeholder.target).removeprefix("L_").removesuffix("_")


def fake_inputs(args: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Fake tensors of the arguments: same sizes, strides, shared storages and gradient flags, no memory."""
    mode = FakeTensorMode()
    with torch.inference_mode(False):
        return mode, [_fake(arg, mode) if isinstance(arg, torch.Tensor) else arg for arg in args]


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if not tensor.is_inference():
        return mode.from_tensor(tensor, static_shapes=True)
    with mode:  # inference tensors have no versions, by which writes are found
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
