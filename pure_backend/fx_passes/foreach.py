"""`torch._foreach_*_` on lists whose tensors share memory.

In eager it calls one operator after the other, and each sees what those before it wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.ir.facts import facts

_FACTOR_LAST = ("addcmul_", "addcdiv_")  # a fourth argument is the keyword `value` of the operator on tensors


def one_after_the_other(node: fx.Node) -> list[tuple[str, tuple, dict[str, Any]]]:
    """The tensor methods that a list operator calls, with their arguments, if it matters that it calls them in turn.

    Returns:
        `[("add_", (a, 1.0), {}), ("add_", (a, 1.0), {})]` for `torch._foreach_add_([a, a], 1.0)`; nothing for another operator,
        and for lists in which no tensor shares memory with a written one.
    """
    name = getattr(node.target, "__name__", "")
    if not (name.startswith("_foreach_") and name.endswith("_")) or not _shares_memory(node):
        return []
    method, args, kwargs = name.removeprefix("_foreach_"), node.args, dict(node.kwargs)
    if method in _FACTOR_LAST and len(args) == 4:
        args, kwargs["value"] = args[:3], args[3]
    if "self" in kwargs:
        args = (kwargs.pop("self"), *args)
    count = len(args[0])
    return [
        (method, tuple(_element(arg, i) for arg in args), {key: _element(arg, i) for key, arg in kwargs.items()})
        for i in range(count)
    ]


def _shares_memory(node: fx.Node) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
    places = Counter(geometry.storage for leaf in tensors if (geometry := facts(leaf).geometry))
    return any(places[facts(arg).geometry.storage] > 1 for arg in facts(node).writes)


def _element(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, Sequence) and not isinstance(value, str) else value
