"""Higher-order operators during propagation: run the operator on fakes, and its bodies too, so that their nodes have facts.

Each entry is `fn(args, kwargs, run_body) -> (value, bodies)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.errors import UnsupportedOperatorError
from pure_backend.ir.describe import source_line

Result = tuple[Any, tuple[fx.GraphModule, ...]]
RunBody = Callable[[fx.GraphModule, Any], tuple[fx.GraphModule, Any]]


def propagate(node: fx.Node, args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    """The value of a higher-order operator on fake arguments, and its propagated bodies.

    Raises:
        UnsupportedOperatorError: The operator has no lowering.
    """
    known = _OPERATORS.get(node.target.name())
    if known is None:
        raise UnsupportedOperatorError(
            f"the higher-order operator {node.target.name()} has no JAX lowering\n  at {source_line(node)}"
        )
    return known(args, kwargs, run_body)


def _checkpoint(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    body, *operands = args
    copy, value = run_body(body, operands)
    return value, (copy,)


def _autograd_function(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    """The user's own forward and backward; gradients of the fakes come from running the real operator."""
    forward, backward, *operands = args
    value = torch.ops.higher_order.autograd_function_apply(forward, backward, *operands, **kwargs)
    with torch.no_grad():
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, operands)
        forward_copy, (results, saved) = run_body(forward, _with_context(forward, detached))
        cotangents = pytree.tree_leaves(results)
        backward_copy, _ = run_body(backward, _with_context(backward, [*cotangents, *saved]))
    return value, (forward_copy, backward_copy)


def _with_context(body: fx.GraphModule, operands: list) -> list:
    """The operands, behind a None for the `ctx` argument that bodies have before torch 2.13."""
    expected = len(body.graph.find_nodes(op="placeholder"))
    return [None] * (expected - len(operands)) + list(operands)


_OPERATORS = {
    "tag_activation_checkpoint": _checkpoint,
    "autograd_function_apply": _autograd_function,
}
