"""The inputs of one call: checked, and as fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pure_backend.errors import DeviceError
from pure_backend.ir.describe import describe_tensor, unsuitable_tensor
from pure_backend.ir.impurity import Unknown
from pure_backend.ir.layout import is_distributed, layout_of
from pure_backend.ir.wrapper import dispatches, take_apart


def check_inputs(gm: fx.GraphModule, args: Sequence[Any]) -> torch.device:
    """The device on which a call's tensors lie.

    Raises:
        DeviceError: Tensors lie on two devices; a CPU tensor of one element beside an accelerator is allowed, as in eager.
    """
    placeholders = gm.graph.find_nodes(op="placeholder", sort=True)
    tensors = [(p, a) for p, a in zip(placeholders, args, strict=True) if isinstance(a, torch.Tensor)]
    placed = [(p, t) for p, t in tensors if t.ndim or t.device.type != "cpu"]
    devices = {tensor.device for _, tensor in placed} or {tensor.device for _, tensor in tensors}
    if len(devices) > 1:
        shown = ", ".join(f"{argument_name(p)}: {describe_tensor(t)} on {t.device}" for p, t in _one_a_device(placed))
        raise DeviceError(f"the arguments of a compiled graph lie on several devices ({shown}): move them to one")
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda", "xla"):
        name = argument_name(tensors[0][0])
        raise DeviceError(f"argument {name!r} lies on {device}: this backend runs on cpu, cuda and xla tensors")
    return device


def _one_a_device(placed: list[tuple[fx.Node, torch.Tensor]]) -> list[tuple[fx.Node, torch.Tensor]]:
    return list({tensor.device: (node, tensor) for node, tensor in reversed(placed)}.values())


def argument_name(placeholder: fx.Node) -> str:
    """The user's name of a graph input: `L_self_parameters_weight_` is `self_parameters_weight`."""
    return str(placeholder.target).removeprefix("L_").removesuffix("_")


def fake_inputs(gm: fx.GraphModule, args: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Fake tensors of the arguments: same sizes, strides, shared storages and gradient flags, no memory.

    A tensor that no program can take (sparse, quantized, nested) becomes an `Unknown` that says so
    by the argument's name.
    """
    # A shape environment, for jagged tensors that the graph makes; it gives no symbols, so host reads are found as without one.
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False))
    placeholders = gm.graph.find_nodes(op="placeholder", sort=True)
    with torch.inference_mode(False):
        fakes = [_fake(node, arg, mode) for node, arg in zip(placeholders, args, strict=True)]
    mode.fake_tensor_converter = FakeTensorConverter()  # the other one refers to the arguments, and facts keep it alive
    return mode, fakes


def _fake(placeholder: fx.Node, arg: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    if is_distributed(arg) and not isinstance(layout_of(arg), str):
        with mode:  # as a tensor on one device, of which no memory is ever seen
            whole = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
        return whole.requires_grad_(arg.requires_grad)
    if reason := unsuitable_tensor(arg):
        return Unknown(f"argument {argument_name(placeholder)!r} is {reason}")
    if dispatches(arg):
        pieces, structure = take_apart(arg)
        return structure.wrap(_fake(placeholder, piece, mode) for piece in pieces)
    if not arg.is_inference():
        return mode.from_tensor(arg, static_shapes=True)
    with mode:  # inference tensors have no versions, by which writes are found
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
