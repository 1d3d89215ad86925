"""What a node does besides computing its result: the impurities that can be seen before it runs on fake tensors.

Random nodes and writing nodes are not among them: programs take a key, and `mutation` makes writes values. Host reads are
found by running on fake tensors, see `propagate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

from pure_backend.ir.describe import qualified_name
from pure_backend.ir.impurity import Impurity

Lowerable = Callable[[Any], bool]
Function = TypeVar("Function", bound=Callable[..., Any])

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem")
_TORCH_NAMESPACES = ("aten", "prims", "prim", "profiler", "pure_backend")
_EFFECTFUL = ("with_effects", "print", "call_torchbind", "triton_kernel_wrapper_mutation", "inductor_compiled_code")


def impure(fn: Function) -> Function:
    """Keep a function out of compiled programs: it stays one node of the graph and runs in eager, between them.

    Dynamo does not look inside `fn`; it runs it once on fake tensors to learn what it returns. What `fn` does to the tensors
    it is given is seen by the programs after it; tensors that it reaches in other ways should not be changed.

    Args:
        fn: A function of tensors and constants, defined outside of the compiled function.

    Returns:
        A function to call in its place.

    Example:
        >>> log = []
        >>> @pure_backend.impure
        ... def watch(x):
        ...     log.append(x.shape)
        ...     return x
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    call.pure_backend_impure = True  # type: ignore[attr-defined]
    allowed: Any = torch._dynamo.allow_in_graph(call)
    return allowed


def impurity(node: fx.Node, lowerable: Lowerable) -> Impurity | None:
    """The reason why a node is impure whatever its arguments are, or None.

    Args:
        node: A node of a normalized graph.
        lowerable: Whether an operator that is not torch's own has a JAX implementation.
    """
    target = node.target
    if getattr(target, "pure_backend_impure", False):
        return Impurity.of(node, "opt-out", "marked with pure_backend.impure")
    if isinstance(target, torch._ops.HigherOrderOperator):
        effectful = target.name() in _EFFECTFUL
        return Impurity.of(node, "side effect", "it has an effect outside of the graph") if effectful else None
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _of_operator(node, target, lowerable)
    if (getattr(target, "__module__", None) or "").startswith("torch.distributed"):
        return Impurity.of(node, "collective", "it communicates with other processes")
    return None


def _of_operator(node: fx.Node, target: Any, lowerable: Lowerable) -> Impurity | None:
    namespace = qualified_name(target).split("::")[0]
    if namespace in _COLLECTIVES:
        return Impurity.of(node, "collective", "it communicates with other processes")
    if namespace in _TORCH_NAMESPACES or lowerable(target):
        return None
    return Impurity.of(node, "custom op", f"the custom operator {target} has no JAX implementation")


def runs_on_fakes(found: Impurity) -> bool:
    """Whether an impure node may still be run on fake tensors, to learn its result's shape and what it writes."""
    return found.kind == "custom op"
