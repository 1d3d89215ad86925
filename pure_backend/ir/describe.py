"""A node in words: its operator, what it was given, and the user's line it came from."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.ir.facts import facts
from pure_backend.ir.wrapper import dispatches, take_apart, why_whole

_TORCH = os.path.dirname(torch.__file__) + os.sep
DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
}
"""The dtypes that programs compute with, and their names."""


def describe_tensor(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape, as `f32[2, 3]`."""
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return f"{dtype}[{', '.join(map(str, tensor.shape))}]"


def describe_value(value: Any) -> str:
    """An argument of a node, tensors by their shape."""
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(describe_value, value)) + "]"
    return repr(value)


def target_name(target: Any) -> str:
    """The readable name of a node's target: `torch.nn.functional.linear`, `Tensor.view`, `aten.add.Tensor`."""
    target = getattr(target, "op", target) if type(target).__name__ == "Functionalized" else target
    if isinstance(target, str):
        return f"Tensor.{target}"
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or str(target)
    return f"{module}.{name}" if module and module not in ("_operator", "builtins") else name


def qualified_name(target: Any) -> str:
    """The name of a library's operator without its overload, as `aten::add`; an empty string for another target."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else ""


def describe_node(node: fx.Node) -> str:
    """One node for an error message: operator, argument shapes, and the user's source line."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: facts(n).value)
    shown = [describe_value(arg) for arg in args] + [f"{key}={describe_value(v)}" for key, v in kwargs.items()]
    line = source_line(node)
    return f"{target_name(node.target)}({', '.join(shown)})" + (f"\n  at {line}" if line else "")


def source_line(node: fx.Node) -> str:
    """The innermost line outside of torch that made a node, or an empty string."""
    trace = node.stack_trace or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not files:
        return ""
    own = [i for i in files if _TORCH not in lines[i]]
    return " ".join(lines[(own or files)[-1] :][:2])


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def unsuitable_tensor(tensor: torch.Tensor) -> str:
    """Why no program can take a tensor, as `a sparse_coo tensor of shape (3, 3)`, or an empty string."""
    if tensor.is_nested:
        return "a nested tensor"
    if dispatches(tensor):
        why = why_whole(tensor) or next((kind for piece in take_apart(tensor)[0] if (kind := unsuitable_tensor(piece))), "")
        return f"a {type(tensor).__name__}, a tensor subclass ({why})" if why else ""
    kind = str(tensor.layout).removeprefix("torch.") if tensor.layout is not torch.strided else ""
    if tensor.is_quantized:
        kind = "quantized"
    elif tensor.dtype not in DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
    return f"a {kind} tensor of shape {tuple(tensor.shape)}" if kind else ""
