"""A function captured whole by Dynamo, for this backend, however often and with whatever shapes it is called.

Dynamo keeps its captures with a code object and gives up after eight. A `Captured` has a code object of its own, which it
leaves for a fresh one when Dynamo gives up: what is kept is bounded, and no function is left to eager for its many signatures.

What Dynamo keeps with a code object keeps the code object (`orig_code_map`), so it would stay for ever; it is freed with the
`Captured`. A backend must therefore give functions that do not refer to the `Captured`'s owner.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from pure_backend.transforms.dynamo import capturing_more, forget_bytecode, forget_captures


class Captured:
    """`captured(fn, *args, **kwargs)` is `fn(*args, **kwargs)` in one compiled graph.

    Args:
        fullgraph: Whether a graph break is an error.
        backend: What compiles the graph, by default this package's; Dynamo keeps it as long as this lives.
        dynamic: As for `torch.compile`.
    """

    def __init__(self, fullgraph: bool = True, backend: Any = None, dynamic: bool | None = None) -> None:
        self.fullgraph = fullgraph
        self.backend = backend or _assume_pure
        self.dynamic = dynamic
        self.compiled = self._fresh()

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn`; inside another compiled function it is part of that."""
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        try:
            return self.compiled(fn, *args, **kwargs)
        except FailOnRecompileLimitHit:
            self.compiled = self._fresh()
            return self.compiled(fn, *args, **kwargs)

    def _fresh(self) -> Callable[..., Any]:
        scope = {"__builtins__": __builtins__, "__name__": __name__}  # Dynamo puts what it compiled among a function's globals
        own = types.FunctionType(_call.__code__.replace(), scope, "call")
        context = torch._dynamo.optimize(backend=self.backend, nopython=self.fullgraph, dynamic=self.dynamic)
        context.callback = _capturing_more(context.callback)
        compiled: Any = context(own)
        weakref.finalize(compiled, forget_captures, own.__code__, scope, self.backend).atexit = False
        return compiled


def _assume_pure(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    compiled = torch._dynamo.lookup_backend("assume_pure")(gm, example_inputs)
    forget_bytecode()
    return compiled


def _capturing_more(convert: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo calls for a frame that it has not captured, under settings that hold for that long: known frames see none."""

    def callback(*args: Any, **kwargs: Any) -> Any:
        with capturing_more():
            return convert(*args, **kwargs)

    callback._torchdynamo_orig_backend = convert._torchdynamo_orig_backend  # type: ignore[attr-defined]  # in its place
    return callback


def _call(fn, *args, **kwargs):
    return fn(*args, **kwargs)


_by_id: dict[int, tuple[weakref.ref, Captured]] = {}


def captured_for(fn: Callable[..., Any]) -> Captured:
    """The captures of a function: one for all function objects with the same code, which differ in their closures only.

    So a lambda that is made anew for every call is captured once. (Dynamo checks what a closure holds.) Codes are told apart as
    objects, since two with equal instructions are equal though their globals may differ; an id counts while its owner lives.
    """
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None:
        return Captured()
    key = id(code)
    known = _by_id.get(key)
    if known is None or known[0]() is not code:
        known = _by_id[key] = (weakref.ref(code, lambda ref: _forget(key, ref)), Captured())
    return known[1]


def _forget(key: int, ref: weakref.ref) -> None:
    if key in _by_id and _by_id[key][0] is ref:
        del _by_id[key]
