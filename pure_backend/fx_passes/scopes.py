"""The scope path of every node: the modules and profiler scopes that it was called in, outermost first.

Before: `%h = _record_function_enter_new("blk"); %y = matmul(x, x); _record_function_exit(%h)`
After:  `%y = matmul(x, x)`, with `facts(y).scopes == ("layers", "0", "blk")`

Dynamo notes a module's path on each node, but drops `record_function` on torch 2.9, and on newer torch unless
`torch._dynamo.config.capture_profiler_record_function` is set. The source lines that it does note say which `with` statements
a node stands in, so scopes whose names are literals are found there; other names need the switch.
"""

from __future__ import annotations

import functools
import re
from itertools import pairwise

from torch import fx

from pure_backend.ir.describe import qualified_name
from pure_backend.ir.facts import learn
from pure_backend.ir.source import frames, scopes_at

_ENTER = ("profiler::_record_function_enter", "profiler::_record_function_enter_new")
_EXIT = ("profiler::_record_function_exit",)


def name_scopes(gm: fx.GraphModule) -> None:
    """Leave the scope path of each node in its facts and erase the profiler's own nodes, in place."""
    opened: list[tuple[fx.Node, str]] = []
    own: list[fx.Node] = []
    for node in gm.graph.nodes:
        name = qualified_name(node.target)
        if name in _ENTER:
            opened.append((node, str(node.args[0])))
        elif name in _EXIT:
            opened = [(opener, scope) for opener, scope in opened if opener is not node.args[0]]
        else:
            learn(node, scopes=_path(node, [scope for _, scope in opened]))
            continue
        own.append(node)
    for node in reversed(own):
        gm.graph.erase_node(node)


def _path(node: fx.Node, captured: list[str]) -> tuple[str, ...]:
    """Module names and scopes; each scope stands behind the module whose code opened it."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    outside, *inside = _scopes_of_modules(node, sum(map(_is_users, modules)))
    path, known = list(outside), ()
    for module in modules:
        names = _module_names(module[0])
        path += names[len(known) :] if names[: len(known)] == known else names
        path += inside.pop(0) if _is_users(module) else ()
        known = names
    return (*(scope for scope in captured if scope not in path), *path)


def _is_users(module: tuple) -> bool:
    """Whether the stack of a node shows the module's `forward`: not so for those of torch.nn."""
    return not getattr(module[1], "__module__", "").startswith("torch.")


def _scopes_of_modules(node: fx.Node, count: int) -> list[list[str]]:
    """The scopes opened outside of the innermost `count` modules, then those opened by the code of each."""
    stack = frames(node)
    scopes = [scopes_at(frame) for frame in stack]
    forwards = [i for i, frame in enumerate(stack) if frame.function.rpartition(".")[2] == "forward"]
    enough = len(forwards) >= count  # not where a module has another entry: then all scopes come last
    starts = forwards[len(forwards) - count :] if enough else [0] * count
    return [[name for names in scopes[a:b] for name in names] for a, b in pairwise([0, *starts, len(stack)])]


@functools.lru_cache(4096)
def _module_names(path: str) -> tuple[str, ...]:
    """`L['self']._modules['layers']._modules['0']` as `("layers", "0")`."""
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path)
    path = re.sub(r"_(modules|parameters|buffers)\.", "", path)
    path = re.sub(r"^[LG]\.(self(\.|$))?", "", path)
    return tuple(part for part in path.split(".") if part)
