"""Where in the user's source a node comes from: its stack of frames, and the profiler scopes that its lines stand in."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from typing import NamedTuple

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_OPENERS = ("record_function", "Trace", "trace_me", "scope")
_TORCH = os.path.dirname(torch.__file__) + os.sep


class Frame(NamedTuple):
    """A line of a function that was running when a node was made."""

    file: str
    line: int
    function: str


def frames(node: fx.Node) -> tuple[Frame, ...]:
    """The stack of a node as Dynamo noted it, outermost first."""
    return _parse(node.stack_trace or "")


@functools.lru_cache(maxsize=4096)
def _parse(trace: str) -> tuple[Frame, ...]:
    return tuple(Frame(file, int(line), function) for file, line, function in _FRAME.findall(trace))


def user_frame(node: fx.Node) -> Frame | None:
    """The innermost frame of a node outside of torch; any innermost one if there is none."""
    stack = frames(node)
    outside = [frame for frame in stack if not frame.file.startswith(_TORCH)]
    return (outside or stack or (None,))[-1]


def scopes_at(frame: Frame) -> tuple[str, ...]:
    """The profiler scopes with literal names that a line stands in within its function, outermost first."""
    around = [span for span in _spans(frame.file) if span.first <= frame.line <= span.last]
    name = frame.function.rpartition(".")[2]
    start = max((span.first for span in around if span.is_function and span.name == name), default=0)
    return tuple(span.name for span in around if not span.is_function and span.first >= start)


class _Span(NamedTuple):
    """Lines of a file that are one scope or one function."""

    name: str
    first: int
    last: int
    is_function: bool


@functools.lru_cache(maxsize=256)
def _spans(file: str) -> tuple[_Span, ...]:
    """The scopes and functions of a file in the order in which they begin."""
    text = "".join(linecache.getlines(file))
    if not any(f"{opener}(" in text for opener in _OPENERS):
        return ()
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a notebook's cell with magics, or a file that changed since
        return ()
    found = [span for node in ast.walk(tree) for span in _spans_of(node)]
    return tuple(sorted(found, key=lambda span: (span.first, -span.last)))


def _spans_of(node: ast.AST) -> list[_Span]:
    if isinstance(node, (ast.With, ast.AsyncWith)):
        first, openers = node.body[0].lineno, [item.context_expr for item in node.items]
        functions = []
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        first, openers = node.lineno, node.decorator_list
        functions = [_Span(node.name, first, _end(node), True)]
    elif isinstance(node, ast.Lambda):
        first, openers, functions = node.lineno, [], [_Span("<lambda>", node.lineno, _end(node), True)]
    else:
        return []
    names = [name for opener in openers if (name := _scope_name(opener))]
    return [*functions, *(_Span(name, first, _end(node), False) for name in names)]


def _end(node: ast.AST) -> int:
    return getattr(node, "end_lineno", 0) or 0


def _scope_name(expression: ast.expr) -> str:
    """The name in `record_function("name")`, or an empty string."""
    if not isinstance(expression, ast.Call) or not expression.args:
        return ""
    function, name = expression.func, expression.args[0]
    opener = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if opener in _OPENERS and isinstance(name, ast.Constant) and isinstance(name.value, str):
        return name.value
    return ""
