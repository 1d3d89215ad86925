"""A graph as text that two equal graphs share: targets, constants and topology; no names, no module paths."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.ir.describe import describe_tensor, qualified_name
from pure_backend.ir.exact import Same
from pure_backend.ir.facts import facts
from pure_backend.ir.functional_ops import Functionalized
from pure_backend.ir.geometry import Geometry
from pure_backend.ir.region import Chain, Region, Shared


def graph_key(gm: fx.GraphModule) -> tuple[str, tuple[Any, ...]]:
    """A graph's canonical text, and the objects that it refers to by number."""
    objects: list[Any] = []
    lines: list[str] = []
    _write_graph(gm, lines, objects)
    return "\n".join(lines), tuple(objects)


def node_text(node: fx.Node, gm: fx.GraphModule) -> tuple[str, tuple[Any, ...]]:
    """What a node does and gives, whichever nodes it is given, and the objects that the text refers to by number."""
    objects: list[Any] = []
    known = facts(node)
    args = _text((node.args, node.kwargs), dict.fromkeys(node.all_input_nodes, 0), objects)
    value = pytree.tree_map_only(torch.Tensor, _value, known.value)
    bodies = [graph_key(body) for body in known.bodies]
    objects += [object for _, body_objects in bodies for object in body_objects]
    texts = [text for text, _ in bodies]
    return f"{_target(node, gm, objects)} {args} {value} {known.grad} {known.autocast} {texts}", tuple(objects)


def foreign(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """The foreign functions and operators of a graph (not torch's, Python's or this package's), with the nodes that name them.

    Their names say what they compute for the life of this process only: their authors may change them before the next one.
    """
    for node in gm.graph.nodes:
        named = [node.target] if node.op == "call_function" else []
        fx.node.map_aggregate((node.args, node.kwargs), named.append)
        yield from ((node, target) for target in map(_unwrapped, named) if callable(target) and not _is_home(target))
        for body in facts(node).bodies:
            yield from foreign(body)


_HOME = ("torch", "torch_xla", "pure_backend", "numpy", "_operator", "operator", "math", "builtins", "functools", "itertools")
_HOME_NAMESPACES = ("aten", "prims", "prim", "profiler", "xla", "higher_order")


def _unwrapped(target: Any) -> Any:
    return _unwrapped(target.op) if isinstance(target, Functionalized) else target


def _is_home(target: Any) -> bool:
    if isinstance(target, (torch._ops.HigherOrderOperator, fx.GraphModule, Region, Shared, Chain)):
        return True
    if name := qualified_name(target):
        return name.split("::")[0] in _HOME_NAMESPACES
    return _owner_of_builtin(target) is not None or str(getattr(target, "__module__", None)).split(".")[0] in _HOME


def _write_graph(gm: fx.GraphModule, lines: list[str], objects: list[Any]) -> None:
    number: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        number[node] = len(number)
        known = facts(node)
        args = _text((node.args, node.kwargs), number, objects)
        line = f"%{number[node]} = {node.op} {_target(node, gm, objects)} {args}"
        if node.op == "placeholder":
            line += f" {_value(known.value)}"
        else:
            line += f" grad={known.grad} autocast={known.autocast}"
        lines.append(line)
        for body in known.bodies:
            lines.append("{")
            _write_graph(body, lines, objects)
            lines.append("}")


def _target(node: fx.Node, gm: fx.GraphModule, objects: list[Any]) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "get_attr":
        return _named(getattr(gm, str(node.target)), objects) if not facts(node).bodies else ""
    return str(node.target) if isinstance(node.target, str) else _named(node.target, objects)


def _named(target: Any, objects: list[Any]) -> str:
    """A name that means this object in every process, or a number among `objects`."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return f"op:{target}"
    if isinstance(target, Functionalized):
        op = target.op if isinstance(target.op, str) else _named(target.op, objects)
        return f"functionalized:{op}:{target.writes}"
    if isinstance(target, (Region, Shared)):
        return target.__name__  # its body follows the node
    if isinstance(target, Chain):
        return target.text
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if (owner := _owner_of_builtin(target)) is not None:
        return f"{owner}.{target.__name__}"
    if module and name:
        found: Any = importlib.import_module(module) if module != "__main__" else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is target and _is_home(target):  # another module's may be another function tomorrow, or after a reload
            return f"{module}.{name}"
    if isinstance(target, fx.GraphModule):
        return "body"
    objects.append(Same(target))
    return f"object:{len(objects) - 1}"


# Built-in functions do not say what they belong to.
_BUILTINS = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch._C._nn": torch._C._nn,
    "torch._C._linalg": torch._C._linalg,
    "torch._C._fft": torch._C._fft,
    "torch._C._special": torch._C._special,
}


def _owner_of_builtin(target: Any) -> str | None:
    """Where torch has a built-in function or method, or None."""
    if not isinstance(target, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return None
    return next((name for name, owner in _BUILTINS.items() if getattr(owner, target.__name__, None) == target), None)


def _text(value: Any, number: dict[fx.Node, int], objects: list[Any]) -> str:
    if isinstance(value, fx.Node):
        return f"%{number[value]}"
    if isinstance(value, Geometry):
        return repr(tuple(value))
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_text(v, number, objects) for v in value) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_text(v, number, objects)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return "slice" + _text((value.start, value.stop, value.step), number, objects)
    if value is None or isinstance(value, (bool, int, float, complex, str, type(Ellipsis))):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return _named(value, objects)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{describe_tensor(value)} {tuple(value.stride())} {value.requires_grad}"
    return f"{type(value).__name__}:{value!r}"
