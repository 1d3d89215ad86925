"""A node in words: its operator, what it was given, and the user's line it came from."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

_DTYPE_NAMES = {
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
}


def describe_tensor(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape, as `f32[2, 3]`."""
    dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
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


def describe_node(node: fx.Node) -> str:
    """One node for an error message: operator, argument shapes, and the user's source line."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["facts"].value if "facts" in n.meta else n)
    shown = [describe_value(arg) for arg in args] + [f"{key}={describe_value(v)}" for key, v in kwargs.items()]
    line = source_line(node)
    return f"{target_name(node.target)}({', '.join(shown)})" + (f"\n  at {line}" if line else "")


def source_line(node: fx.Node) -> str:
    """The innermost line of the user's code that made a node, or an empty string."""
    trace = node.meta.get("stack_trace") or getattr(node, "stack_trace", None) or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not files:
        return ""
    return " ".join(lines[files[-1] :][:2])


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
