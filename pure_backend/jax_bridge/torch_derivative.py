"""Torch's own derivative of an operator, as a graph of ATen operators and as the derivative of a JAX function.

Torch decides by formula what a gradient is at a kink, a pole or a tie; differentiating whatever computes the value decides it
otherwise. For the operators of `lowerings/formulas.py` torch's autograd is traced on fake tensors, and what it did is the
backward. Its operators have derivatives of their own, so a second derivative is torch's too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pure_backend.ir.facts import derive
from pure_backend.jax_bridge.conjugation import conjugate
from pure_backend.jax_bridge.decompose import FakeCall, traced


def backward_graph(call: FakeCall) -> fx.GraphModule:
    """What autograd does for a call that writes nothing.

    Returns:
        A graph `(*tensors, *results, *cotangents of floating-point results) -> gradients of floating-point tensors`, where
        `tensors` are the distinct ones of the call.
    """
    with FakeTensorMode(), torch.no_grad():
        # On the CPU: torch_xla's kernels of composites such as `std` have no derivative, and no device matters here.
        tensors = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in call.unique(call.leaves)]
        results = call(*tensors)
        constant = {i for i, tensor in enumerate(tensors) if not differentiable(tensor) or _refuses(call, tensors, i)}

    def joint(*values: torch.Tensor) -> list[torch.Tensor]:
        given, cotangents = values[: len(tensors)], values[len(tensors) :]
        chosen = [i for i in range(len(given)) if i not in constant]

        def function(*leaves: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            replaced = dict(zip(chosen, leaves, strict=True))
            outputs = call(*(replaced.get(i, value) for i, value in enumerate(given)))
            return [output for output in outputs if differentiable(output)], outputs

        found: Any = torch.func.vjp(function, *(given[i] for i in chosen), has_aux=True)
        _, vjp, outputs = found
        grads = dict(zip(chosen, vjp(list(cotangents)), strict=True))
        return [*outputs, *(grads.get(i, torch.zeros_like(t)) for i, t in enumerate(given) if differentiable(t))]

    cotangents = [result for result in results if differentiable(result)]
    return _given_results(traced(joint, (*tensors, *cotangents)), len(tensors), len(results))


def _refuses(call: FakeCall, tensors: Sequence[torch.Tensor], number: int) -> bool:
    """Whether the operator is not differentiable with respect to a tensor (the weights of a loss): autograd says so."""
    tensors = [tensor.detach().requires_grad_(i == number) for i, tensor in enumerate(tensors)]
    try:
        with torch.enable_grad():
            call(*tensors)
    except RuntimeError as error:
        if "is not differentiable with respect to" not in str(error):
            raise
        return True
    return False


def differentiable(value: Any) -> bool:
    """Whether a value may have a gradient."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _given_results(gm: fx.GraphModule, tensors: int, results: int) -> fx.GraphModule:
    """The joint graph with results as inputs: the forward leaves it."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    outputs: Any = gm.graph.output_node().args[0]
    with gm.graph.inserting_after(placeholders[tensors - 1]):
        given = [gm.graph.placeholder(f"result_{i}") for i in reversed(range(results))][::-1]
    for value, placeholder in zip(outputs[:results], given, strict=True):
        value.replace_all_uses_with(derive(placeholder, value))
    gm.graph.output_node().args = (list(outputs[results:]),)
    gm.graph.eliminate_dead_code()
    return gm


Function = Callable[..., Sequence[jax.Array]]


def with_torch_derivative(compute: Function, backward: Function) -> Function:
    """A function of arrays with torch's derivative.

    Args:
        compute: The function.
        backward: What a graph of `backward_graph` computes. It is called when the function is differentiated and not before:
            torch's backward of an operator may contain the operator.
    """

    @jax.custom_vjp
    def apply(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(compute(*arrays))

    def forward(*arrays: jax.Array) -> tuple[Any, Any]:
        results = apply(*arrays)  # and not `compute`: a second derivative meets this function's own
        return results, (arrays, results)

    apply.defvjp(forward, functools.partial(_pullback, backward))
    return apply


def check_backward(compute: Function, backward: Function, arrays: Sequence[jax.Array]) -> None:
    """Trace a backward.

    Raises:
        UnsupportedOperatorError: It contains an operator without a lowering.
    """
    results = jax.eval_shape(compute, *arrays)
    jax.eval_shape(lambda arrays, results: _pullback(backward, (arrays, results), results), tuple(arrays), results)


def _pullback(backward: Function, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """The cotangents of the arguments for those of the results."""
    arrays, results = residuals
    given = [conjugate(c) for c in cotangents if _inexact(c)]
    grads = iter(backward(*arrays, *results, *given))
    return tuple(conjugate(next(grads)) if _inexact(array) else _float0(array) for array in arrays)


def _inexact(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _float0(array: jax.Array) -> Any:
    return jnp.zeros(array.shape, jax.dtypes.float0)
