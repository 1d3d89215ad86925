"""Calls and parts of calls that run in eager torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pure_backend.calls.call_plan import CallPlan
from pure_backend.fx_passes.regions import changes_mode
from pure_backend.ir.modes import modes_kept
from pure_backend.ir.wrapper import dispatches

_logger = logging.getLogger("pure_backend")


class EagerStage:
    """Nodes that run in eager torch."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.has_modes = any(changes_mode(node) for node in gm.graph.nodes)

    def __call__(self, args: Sequence[Any]) -> Any:
        """What the stage's graph returns."""
        with contextlib.ExitStack() as stack:
            if self.has_modes:
                stack.enter_context(modes_kept())
            if any(map(_is_traced_subclass, args)):
                stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            return fx.Interpreter(self.gm).run(*args)


def _is_traced_subclass(value: Any) -> bool:
    """Whether Dynamo has traced through a tensor's `__torch_function__` already: not for one that also dispatches."""
    return isinstance(value, torch.Tensor) and type(value) not in _PLAIN and not dispatches(value)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class EagerPlan(CallPlan):
    """A call that runs in eager torch, for a reason that was logged."""

    def __init__(self, gm: fx.GraphModule, reason: str) -> None:
        self.run = EagerStage(gm)
        self.reason = reason
        _logger.warning("a compiled graph runs in eager: %s", reason)

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        return self.run(args)


class Trial(CallPlan):
    """A call of which a node raised on fake tensors, or seems to be refused by eager: eager decides.

    It runs in eager. If that raises, it is what the user has to see, and nothing is kept; if not, `accept` is called.
    """

    lasting = False

    def __init__(self, gm: fx.GraphModule, accept: Callable[[], Any]) -> None:
        self.run = EagerStage(gm)
        self.accept = accept

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        outputs = self.run(args)
        self.accept()
        return outputs
