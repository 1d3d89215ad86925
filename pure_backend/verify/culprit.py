"""The first node of a graph that differs from eager on eager's own values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from pure_backend.ir.facts import facts, reads_input_scalar
from pure_backend.ir.functional_ops import Functionalized
from pure_backend.ir.modes import modes_kept, no_autocast
from pure_backend.jax_bridge.arrays import ArrayViews, to_tensor
from pure_backend.jax_bridge.lowerings.registry import names_of
from pure_backend.jax_bridge.rng import KEY_SHAPE, KeyStream
from pure_backend.jax_bridge.trace import Walker, tracing
from pure_backend.verify.difference import Bounds, Difference, compare, tensors_in
from pure_backend.verify.eager_reference import eagerly, off_xla

_UNINITIALIZED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
_COTANGENT_SEED = 0


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A node that alone differs from eager, with eager's arguments."""

    node: fx.Node
    difference: Difference
    args: tuple
    kwargs: dict


def first_difference(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], gradients: bool) -> Culprit | None:
    """The first node of a functional graph whose lowering, on eager's values, does not give eager's result."""
    remaining = iter(inputs)
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            return None
        if node.op == "placeholder":
            env[node] = next(remaining) if isinstance(facts(node).value, torch.Tensor) else facts(node).value
        elif node.op == "get_attr":
            env[node] = getattr(gm, str(node.target))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            one = _OneNode(node, env)
            env[node] = one.in_torch(args, kwargs)
            if (difference := one.compare(env[node], gradients)) is not None:
                return Culprit(node, difference, args, kwargs)
    return None


class _OneNode:
    """One node with the values that eager has for its inputs, in torch and in JAX."""

    def __init__(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        self.node = node
        self.values = {arg: env[arg] for arg in node.all_input_nodes}
        known = facts(node)
        self.bounds = Bounds.of([node], list(self.values.values()))
        self.inputs = [arg for arg, value in self.values.items() if isinstance(value, (torch.Tensor, tuple, list, float))]
        self.differentiable = [
            arg for arg in self.inputs if known.grad and _requires_grad(arg) and isinstance(self.values[arg], torch.Tensor)
        ]

    def in_torch(self, args: Any, kwargs: Any) -> Any:
        """Eager's value."""
        known, node = facts(self.node), self.node
        args, kwargs = off_xla(args), off_xla(kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(modes_kept())
            stack.enter_context(no_autocast())
            for kind, dtype in known.autocast:
                stack.enter_context(torch.autocast(off_xla(kind), dtype=dtype, cache_enabled=False))
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return eagerly(node.target)(*args, **kwargs)

    def compare(self, want: Any, gradients: bool) -> Difference | None:
        """How the node's lowering differs from eager."""
        if reads_input_scalar(self.node) or not tensors_in(want):
            return None
        arrays, draws = self.in_jax()
        values = not draws and not is_uninitialized(self.node)
        for i, (array, tensor) in enumerate(zip(arrays, _results(self.node, want), strict=True)):
            what = "its result" if len(arrays) == 1 else f"its result {i}"
            if difference := compare(what, to_tensor(array), tensor, self.bounds, values):
                return difference
        return self.compare_gradients() if gradients and self.differentiable and not draws else None

    def in_jax(self) -> tuple[list[jax.Array], bool]:
        """The lowering's results, and whether it drew random numbers."""
        views, draws = ArrayViews(), []
        with tracing():
            arrays = [_array(self.values[arg], views) for arg in self.inputs]

            def function(key, *arrays):
                walker = Walker(KeyStream(key))
                result = walker.node(self.node, dict(self.values) | dict(zip(self.inputs, arrays, strict=True)))
                draws.append(walker.keys.used > 0)
                return _results(self.node, result)

            results = jax.jit(function)(jnp.zeros(KEY_SHAPE, jnp.uint32), *arrays)
            return jax.block_until_ready(results), draws[-1]

    def compare_gradients(self) -> Difference | None:
        """How the gradients of the node's inputs differ, for the same cotangents."""
        want, cotangents = self.gradients_in_torch()
        if not cotangents:
            return None
        got = self.gradients_in_jax(cotangents)
        for arg, ours, eager in zip(self.differentiable, got, want, strict=True):
            eager = torch.zeros_like(self.values[arg]) if eager is None else eager
            if difference := compare(f"the gradient of its argument {arg.name}", to_tensor(ours), eager, self.bounds):
                return difference
        return None

    def gradients_in_torch(self) -> tuple[Sequence[Any], dict[int, torch.Tensor]]:
        """Gradients, and the cotangent of each result that carries one."""
        leaves = {arg: self.values[arg].detach().clone().requires_grad_() for arg in self.differentiable}
        with torch.enable_grad():
            env = dict(self.values) | {arg: leaf.clone() for arg, leaf in leaves.items()}
            result = self.in_torch(*fx.map_arg((self.node.args, self.node.kwargs), env.__getitem__))
        results = _results(self.node, result)
        generator = torch.Generator().manual_seed(_COTANGENT_SEED)
        cotangents = {
            i: torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator).to(tensor.device)
            for i, tensor in enumerate(results)
            if tensor.requires_grad
        }
        heads = [results[i] for i in cotangents]
        if not heads:
            return [], {}
        return torch.autograd.grad(heads, list(leaves.values()), list(cotangents.values()), allow_unused=True), cotangents

    def gradients_in_jax(self, cotangents: dict[int, torch.Tensor]) -> Sequence[Any]:
        """Gradients of the node's lowering."""
        views = ArrayViews()
        with tracing():
            fixed = {arg: _array(self.values[arg], views) for arg in self.inputs if arg not in self.differentiable}
            chosen = [_array(self.values[arg], views) for arg in self.differentiable]
            given = [_array(cotangent, views) for cotangent in cotangents.values()]

            def function(*arrays):
                env = dict(self.values) | fixed | dict(zip(self.differentiable, arrays, strict=True))
                result = Walker(KeyStream(jnp.zeros(KEY_SHAPE, jnp.uint32))).node(self.node, env)
                return [_results(self.node, result)[i] for i in cotangents]

            def gradients(chosen, given):
                _, vjp = jax.vjp(function, *chosen)
                return [jnp.conj(grad) for grad in vjp([jnp.conj(cotangent) for cotangent in given])]

            return jax.block_until_ready(jax.jit(gradients)(chosen, given))


def _requires_grad(node: fx.Node) -> bool:
    value = facts(node).value
    return isinstance(value, torch.Tensor) and value.requires_grad


def _results(node: fx.Node, value: Any) -> list[Any]:
    """The tensors, or arrays, that a node gives; those that a writing node returns are its arguments, or copies of them."""
    return tensors_in(value[1:] if isinstance(node.target, Functionalized) else value)


def _array(value: Any, views: Callable[[torch.Tensor], jax.Array]) -> Any:
    """Tensors as arrays, and a float that may change as a 0-d one."""
    if isinstance(value, (tuple, list)):
        return tuple(_array(part, views) for part in value)
    if isinstance(value, torch.Tensor):
        return views(value)
    return jnp.asarray(value, jnp.float64) if isinstance(value, float) else value


def is_uninitialized(node: fx.Node) -> bool:
    """Whether a node's values are whatever lay in memory."""
    return not isinstance(node.target, Functionalized) and names_of(node.target)[-1] in _UNINITIALIZED
