"""Operators of flat tensors, and the operators that their gradients and batched forms are.

Where a program can run at once an operator's gradient is the program's. Where torch traces (AOTAutograd, export, functorch),
the gradient has to be an operator itself: `ns::op_vjp`, which computes the function again and
differentiates it. Its own gradient is `ns::op_vjp_vjp`, and so on; the same with `ns::op_vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from pure_backend.custom_ops.flat import FlatCalls, FlatFunction, runs_here, shapes_of
from pure_backend.custom_ops.parameters import decode, encode
from pure_backend.ir.opaque import opaque
from pure_backend.ir.positions import with_values
from pure_backend.jax_bridge.avals import is_differentiable, to_aval
from pure_backend.jax_bridge.conjugation import conjugate
from pure_backend.jax_bridge.lower import to_hlo
from pure_backend.jax_bridge.lowerings import lowers
from pure_backend.jax_bridge.lowerings.registry import Site
from pure_backend.jax_bridge.platform import for_platform
from pure_backend.jax_bridge.trace import tracing

_SCHEMA = "(Tensor[] tensors, str call) -> Tensor[]"


def register_kernels(
    name: str,
    library: torch.library.Library,
    kernel: Callable[..., Any],
    without_gradient: Callable[..., Any],
    fake: Callable[..., Any],
    vmap_rule: Callable[..., Any],
) -> None:
    """What torch calls for an operator; Dynamo enters none of it, also where a compiled function calls the operator in eager.

    Args:
        name: `"namespace::operator"`, defined in `library`.
        library: Where the kernels are registered.
        kernel: Where autograd may record.
        without_gradient: Below autograd.
        fake: See `torch.library.register_fake`.
        vmap_rule: See `torch.library.register_vmap`.
    """
    operator = name.split("::")[1]
    library.impl(operator, opaque(kernel), "Autograd")
    library.impl(operator, opaque(without_gradient), "CompositeExplicitAutograd")
    torch.library.register_fake(name, opaque(fake), lib=library)
    torch.library.register_vmap(name, opaque(vmap_rule), lib=library)


class Derivable:
    """An operator with a JAX function of flat arrays.

    Args:
        library: Where its derived operators are defined.
        operator: Its name there.
        function: The JAX function of flat arrays for what is static in a call.
        dispatch: Calls the operator itself, through torch's dispatcher: `(static, tensors) -> flat results`.
    """

    def __init__(
        self,
        library: torch.library.Library,
        operator: str,
        function: Callable[[Any], FlatFunction],
        dispatch: Callable[[Any, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        self.library = library
        self.operator = operator
        self.name = f"{library.ns}::{operator}"
        self.function = function
        self.dispatch = dispatch
        self.calls = FlatCalls(self.name, function)

    @functools.cached_property
    def vjp(self) -> FlatOp:
        """`(tensors, cotangents) -> gradients of the floating-point tensors`; static: `(static, tensors, present outputs)`."""
        return FlatOp(self.library, f"{self.operator}_vjp", functools.partial(_vjp_function, self.function))

    @functools.cached_property
    def vmap(self) -> FlatOp:
        """The batched operator; static: `(static, dimensions, batch size)`. The results' batch comes first."""
        return FlatOp(self.library, f"{self.operator}_vmap", functools.partial(_vmap_function, self.function))

    @functools.cached_property
    def jvp(self) -> FlatOp:
        """`(tensors, tangents) -> tangents of the floating-point results`; static: `(static, tensors, present tangents)`."""
        return FlatOp(self.library, f"{self.operator}_jvp", functools.partial(_jvp_function, self.function))

    def define_first_derived(self) -> None:
        """Define the gradients and the batched form now: graphs that another process cached may name them."""
        _ = self.vjp, self.jvp, self.vmap

    def run(self, static: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The operator's kernel where autograd may record."""
        forward_mode = forward_ad._current_level >= 0
        if not forward_mode and runs_here(tensors):
            return self.calls(static, tensors)
        if forward_mode or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            with enable_single_level_autograd_function():
                results: Any = _Traced.apply(self, static, *tensors)
            return results
        with torch._C._AutoDispatchBelowAutograd():
            return self.dispatch(static, tensors)

    def run_without_gradient(self, static: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The kernel below autograd."""
        with torch.no_grad():
            return self.calls(static, tensors)

    def gradients(self, static: Any, tensors: Sequence[torch.Tensor], grads: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradient of each tensor, through the operator that computes it."""
        present = tuple(i for i, grad in enumerate(grads) if grad is not None)
        given = [grads[i].contiguous() for i in present]
        results = iter(self.vjp((static, len(tensors), present), [*tensors, *given]))
        return [next(results) if t.is_floating_point() or t.is_complex() else None for t in tensors]

    def batched(self, static: Any, in_dims: Sequence[int | None], size: int, tensors: Sequence[torch.Tensor]):
        """The results of the batched operator; the batch is their first dimension."""
        return self.vmap((static, tuple(in_dims), size), tensors)


class _Traced(torch.autograd.function._SingleLevelFunction):
    """An operator where torch traces, as an autograd node of the present level: what torch's own kernels for autograd make.

    (`torch.autograd.Function` would ask functorch for its levels, which the dispatcher has seen to on the way to a kernel.)
    """

    @staticmethod
    def forward(op: Derivable, static: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator, below this level."""
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(op.dispatch(static, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Keep the tensors for the gradient."""
        ctx.op, ctx.static, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.inexact = [t.is_floating_point() or t.is_complex() for t in output]
        ctx.mark_non_differentiable(*(t for t, inexact in zip(output, ctx.inexact, strict=True) if not inexact))

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        """The gradients, through the operator that computes them."""
        return None, None, *ctx.op.gradients(ctx.static, ctx.saved_tensors, grads)

    @staticmethod
    @opaque
    def jvp(ctx: Any, op: Any, static: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The tangents of the results, through the operator that computes them."""
        present = tuple(i for i, tangent in enumerate(tangents) if tangent is not None)
        given = [tangents[i] for i in present]
        results = iter(ctx.op.jvp((ctx.static, len(tangents), present), [*ctx.saved_tensors, *given]))
        return tuple(next(results) if inexact else None for inexact in ctx.inexact)


class FlatOp(Derivable):
    """`ns::op(Tensor[] tensors, str call) -> Tensor[]`."""

    def __init__(self, library: torch.library.Library, operator: str, function: Callable[[Any], FlatFunction]) -> None:
        super().__init__(library, operator, function, self.__call__)
        library.define(f"{operator}{_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, library.ns), operator).default
        register_kernels(self.name, library, self.kernel, self.kernel_without_gradient, self.fake, self.vmap_rule)
        lowers(self.name, content=self.content)(self.lowering)

    def __call__(self, static: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, through torch's dispatcher."""
        return self.overload(list(tensors), encode(static))

    def kernel(self, tensors: list[torch.Tensor], call: str) -> list[torch.Tensor]:
        """The operator where autograd may record."""
        return list(self.run(decode(call), tensors))

    def kernel_without_gradient(self, tensors: list[torch.Tensor], call: str) -> list[torch.Tensor]:
        """The operator below autograd."""
        return list(self.run_without_gradient(decode(call), tensors))

    def fake(self, tensors: list[torch.Tensor], call: str) -> list[torch.Tensor]:
        """Empty results."""
        return shapes_of(self.function(decode(call)), tensors)

    def lowering(self, site: Site, tensors: list[Any], call: str) -> list[Any]:
        """The JAX function itself, inside a program."""
        return list(self.function(decode(call))(*tensors))

    def content(self, platform: str, tensors: list[torch.Tensor], call: str) -> str:
        """What the operator computes, see `lowers`."""
        return content_of(self.function(decode(call)), tensors, platform)

    def vmap_rule(
        self, info: Any, in_dims: tuple, tensors: list[torch.Tensor], call: str
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Torch's batching rule."""
        results = self.batched(decode(call), in_dims[0], info.batch_size, tensors)
        return results, [0] * len(results)


def content_of(function: FlatFunction, tensors: Sequence[torch.Tensor], platform: str) -> str:
    """A function of flat arrays and its gradient as StableHLO: what they compute, in text that does not name this process.

    (A jaxpr would not do: it shows a custom gradient as the address of a Python function.)

    Args:
        function: The function.
        tensors: Fakes of its arguments; the gradient is that of those which require one.
        platform: "cpu", "cuda" or "tpu".
    """
    wanted = [i for i, t in enumerate(tensors) if t.requires_grad and is_differentiable(t.dtype)]

    def with_gradient(arrays: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def differentiated(*chosen: Any) -> list[Any]:
            return _inexact(function(*with_values(arrays, wanted, chosen)))

        return function(*arrays), jax.vjp(differentiated, *(arrays[i] for i in wanted))[1](list(cotangents))

    with tracing():
        avals = [to_aval(tensor) for tensor in tensors]
        cotangents = _inexact(jax.eval_shape(lambda *arrays: list(function(*arrays)), *avals)) if wanted else []
        jaxpr = jax.make_jaxpr(with_gradient)(avals, cotangents) if wanted else jax.make_jaxpr(function)(*avals)
    return to_hlo(for_platform(jaxpr, platform), platform).as_text()


def _inexact(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if jnp.issubdtype(value.dtype, jnp.inexact)]


def _vjp_function(function: Callable[[Any], FlatFunction], static: tuple[Any, int, tuple[int, ...]]) -> FlatFunction:
    inner, count, present = static

    def gradients(*arrays: Any) -> list[Any]:
        primals, given = arrays[:count], dict(zip(present, arrays[count:], strict=True))
        chosen = [i for i, a in enumerate(primals) if jnp.issubdtype(a.dtype, jnp.inexact)]

        def differentiated(*values: Any) -> list[Any]:
            return list(function(inner)(*with_values(primals, chosen, values)))

        outputs, vjp = jax.vjp(differentiated, *(primals[i] for i in chosen))
        return [conjugate(grad) for grad in vjp([_cotangent(out, given.get(i)) for i, out in enumerate(outputs)])]

    return gradients


def _jvp_function(function: Callable[[Any], FlatFunction], static: tuple[Any, int, tuple[int, ...]]) -> FlatFunction:
    inner, count, present = static

    def tangents(*arrays: Any) -> list[Any]:
        primals, given = arrays[:count], dict(zip(present, arrays[count:], strict=True))
        chosen = [_tangent(primal, given.get(i)) for i, primal in enumerate(primals)]
        outputs, found = jax.jvp(lambda *values: list(function(inner)(*values)), tuple(primals), tuple(chosen))
        return [t for out, t in zip(outputs, found, strict=True) if jnp.issubdtype(out.dtype, jnp.inexact)]

    return tangents


def _tangent(primal: Any, given: Any) -> Any:
    if not jnp.issubdtype(primal.dtype, jnp.inexact):
        return np.zeros(primal.shape, jax.dtypes.float0)
    return jnp.zeros_like(primal) if given is None else given.astype(primal.dtype)


def _vmap_function(function: Callable[[Any], FlatFunction], static: tuple[Any, tuple[int | None, ...], int]) -> FlatFunction:
    inner, in_dims, size = static
    return jax.vmap(lambda *arrays: list(function(inner)(*arrays)), in_axes=in_dims, axis_size=size)


def _cotangent(output: Any, given: Any) -> Any:
    """What JAX expects for an output: zeros for an absent cotangent, float0 for an output that carries no gradient."""
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jnp.zeros(output.shape, output.dtype) if given is None else conjugate(given.astype(output.dtype))
