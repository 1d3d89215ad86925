"""Selective checkpoints: which values a checkpointed body keeps is decided by torch's own policy, run on fakes.

Before: `%y = matmul(a, b); %z = sin(y)` with a policy that saves `aten.mm`
After:  `%y = matmul(a, b); %s = saved(y); %z = sin(s)`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from pure_backend.ir.facts import derive, facts
from pure_backend.ir.functional_ops import saved

_logger = logging.getLogger("pure_backend")
_SAVING = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def mark_saved(body: fx.GraphModule, operands: Sequence[Any], context_fn: Callable[[], tuple[Any, Any]]) -> None:
    """Mark, in a propagated body, the values that the user's `context_fn` keeps; without a policy in it, none.

    A node is kept whole if the policy keeps one of the ATen operators it is made of: a program has no name for the others.

    Args:
        body: The body; it is changed.
        operands: Fake operands that the body is run on once more, since policies may count.
        context_fn: What the user gave to `torch.utils.checkpoint.checkpoint`.
    """
    policy = getattr(context_fn()[0], "policy_fn", None)
    if policy is None:
        _logger.warning("a checkpoint recomputes everything: its context_fn is not create_selective_checkpoint_contexts")
        return
    mode = _PolicyMode(policy)
    with mode:
        _Interpreter(body, mode).run(*operands)
    for node in mode.saved:
        if isinstance(facts(node).value, torch.Tensor):
            _mark(body, node)


def _mark(body: fx.GraphModule, node: fx.Node) -> None:
    users = list(node.users)
    with body.graph.inserting_after(node):
        mark = derive(body.graph.call_function(saved, (node,)), node)
    for user in users:
        user.replace_input_with(node, mark)


class _PolicyMode(TorchDispatchMode):
    """Asks the policy about each ATen operator, and notes the graph nodes with one that it keeps."""

    def __init__(self, policy: Callable[..., Any]) -> None:
        super().__init__()
        self.policy = policy
        self.context = SelectiveCheckpointContext(is_recompute=False)
        self.node: Any = None
        self.saved: dict[fx.Node, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        decision = self.policy(self.context, func, *args, **kwargs)
        if decision in _SAVING or decision is True:
            self.saved[self.node] = None
        return func(*args, **kwargs)


class _Interpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mode: _PolicyMode) -> None:
        super().__init__(gm)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        self.mode.node = n
        return super().run_node(n)
