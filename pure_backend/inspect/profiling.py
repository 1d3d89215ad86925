"""Profiler scopes that Dynamo can trace, so that their names reach the HLO of forward and backward."""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch


def scope(name: str) -> AbstractContextManager[Any]:
    """A profiler scope for code that runs compiled and in eager, on plain and on `xla` tensors.

    Compiled, it becomes part of the `op_name` of every HLO instruction made inside, in forward and backward. In eager it is
    `torch_xla.debug.profiler.Trace` where torch_xla is in use, and `torch.profiler.record_function` elsewhere.

    Args:
        name: The name; a literal, or set `torch._dynamo.config.capture_profiler_record_function` (torch 2.13 has it).

    Example:
        >>> def f(x):
        ...     with pure_backend.scope("attention"):
        ...         return x @ x
    """
    if torch.compiler.is_compiling() or "torch_xla" not in sys.modules:
        return torch.profiler.record_function(name)
    import torch_xla.debug.profiler as profiler

    return profiler.Trace(name)


def make_xla_traces_traceable() -> None:
    """Let Dynamo trace `torch_xla.debug.profiler.Trace` and `trace_me`, at which it otherwise leaves a function to eager.

    `Trace` becomes a function of that module: call this before a model takes it by `from ... import Trace`.
    """
    import torch_xla.debug.profiler as profiler

    original = profiler.Trace
    if not inspect.isclass(original):  # done already
        return

    def trace(name: str, **kwargs: Any) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if torch.compiler.is_compiling() else original(name, **kwargs)

    profiler.Trace = trace
