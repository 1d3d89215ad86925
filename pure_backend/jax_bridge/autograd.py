"""A program as one node of torch's autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pure_backend.ir.modes import hooks_on_saved_tensors
from pure_backend.ir.opaque import opaque
from pure_backend.jax_bridge.batching import call_batched, is_batching
from pure_backend.jax_bridge.program import Program


class _Saved:
    """What a backward needs, freed with the graph as torch's own saved tensors are.

    Attributes:
        tensors: What the program was given: its inputs, and then the key.
        versions: Their versions.
        fresh: Handles of the residuals that are no inputs.
        kept: What keeps these, where hooks on saved tensors made it.
    """

    __slots__ = ("fresh", "kept", "tensors", "versions")

    def __init__(self, tensors: Sequence[Any], fresh: Sequence[Any]) -> None:
        self.tensors = tensors
        self.versions = _versions(tensors)
        self.fresh = fresh

    def check(self, position: int) -> torch.Tensor:
        """An input, as it was in the forward.

        Raises:
            RuntimeError: It was modified in place since, as torch would say of a saved tensor.
        """
        tensor = self.tensors[position]
        if _version(tensor) != self.versions[position]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"input {position} of a compiled graph, {tensor.type()} {list(tensor.shape)}, is at version "
                f"{tensor._version}; expected version {self.versions[position]} instead. Hint: a `clone()` of it inside of the "
                "compiled function is kept as it was"
            )
        return tensor


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor among them has no version
        return [_version(tensor) for tensor in tensors]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class PureFunction(torch.autograd.Function):
    """Runs a program and gives its gradient; one class for all programs, so that torch makes no class a call.

    `PureFunction.apply(program, *inputs, key)` returns the program's outputs. Residuals ride on one empty saved tensor: saving
    each would cost 1 us, and torch frees this one as it frees any (after backward without `retain_graph`). Where the user has
    hooks on saved tensors (checkpoint, `save_on_cpu`), inputs and residuals are saved one by one for them to see.
    """

    @staticmethod
    def forward(ctx: Any, program: Program, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs; the residuals are kept."""
        results = program.forward(program.runtime.enter(given))
        outputs = tuple(map(program.runtime.deliver, results[: program.outputs]))
        if hooks_on_saved_tensors():
            *inputs, ctx.key = given
            ctx.save_for_backward(*inputs, *map(program.runtime.leave, results[program.outputs :]))
        else:
            holder = torch.empty(0)
            holder.pure_backend_saved = _Saved(given, results[program.outputs :])  # type: ignore[attr-defined]
            ctx.save_for_backward(holder)
        ctx.program = program
        ctx.mark_non_differentiable(*(t for t, carries in zip(outputs, program.differentiable, strict=True) if not carries))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @opaque
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs; None for those that no given cotangent reaches."""
        program, saved = ctx.program, _saved(ctx)
        carried = [c for c, carries in zip(cotangents, program.differentiable, strict=True) if carries]
        present = tuple(c is not None for c in carried)
        given = [c for c in carried if c is not None]
        grads: list[torch.Tensor | None] = [None] * len(saved.tensors)
        if not given:
            return (None, *grads)
        if torch.is_grad_enabled():
            results = _differentiable_gradients(program, saved, present, given)
        elif is_batching(given):
            results = _batched_gradients(program, saved, present, given)
        else:
            results = _gradients(program, saved, present, given)
        reached = _reached(program, present)
        for position, grad in zip(program.inputs, results, strict=True):
            if position in reached:
                grads[position] = grad
        return (None, *grads)


def _saved(ctx: Any) -> _Saved:
    """What the forward saved: the values it saw, or what hooks on saved tensors made of them."""
    tensors = ctx.saved_tensors
    if len(tensors) == 1 and (saved := getattr(tensors[0], "pure_backend_saved", None)) is not None:
        return saved
    count = len(tensors) - ctx.program.fresh
    saved = _Saved((*tensors[:count], ctx.key), ctx.program.runtime.enter(tensors[count:]))
    saved.kept = tensors
    return saved


def _reached(program: Program, present: tuple[bool, ...]) -> frozenset[int]:
    reach = [inputs for inputs, carries in zip(program.reach, program.differentiable, strict=True) if carries]
    return frozenset().union(*(inputs for inputs, here in zip(reach, present, strict=True) if here))


def _gradients(program: Program, saved: _Saved, present: tuple[bool, ...], given: list[torch.Tensor]):
    """The backward program on the residuals of the forward."""
    runtime = program.runtime
    residuals = program.residuals
    own = iter(runtime.enter([saved.check(r.input) for r in residuals if r.input is not None]))
    handles = [saved.fresh[r.fresh] if r.input is None else next(own) for r in residuals]
    results = program.backward(present)([*handles, *runtime.enter(given)])
    return [runtime.leave(result) for result in results]


def _batched_gradients(program: Program, saved: _Saved, present: tuple[bool, ...], given: list[torch.Tensor]):
    """The backward program on the residuals of the forward, for a batch of cotangents."""
    leave, places = program.runtime.leave, program.residuals
    *_, key = saved.tensors
    residuals = [leave(saved.fresh[r.fresh]) if r.input is None else saved.check(r.input) for r in places]
    return call_batched(call_program, program.backward_program(present), [*residuals, *given], key)


def _differentiable_gradients(program: Program, saved: _Saved, present: tuple[bool, ...], given: list[torch.Tensor]):
    """With `create_graph=True`: the gradient as a program of the original inputs, itself differentiable."""
    gradient = program.gradient(present)
    used = set(gradient.forward.kept)
    *inputs, key = [saved.check(i) if i in used else tensor for i, tensor in enumerate(saved.tensors)]
    return call_batched(call_program, gradient, [*inputs, *given], key)


def call_program(program: Program, inputs: Sequence[torch.Tensor], key: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of a program for its inputs and a random key, with gradient if it has one and autograd records."""
    if program.inputs and any(program.differentiable):
        with torch.enable_grad():
            outputs: Any = PureFunction.apply(program, *inputs, key)
            return outputs
    with torch.no_grad():
        results = program.forward(program.runtime.enter([*inputs, key]))
        return [program.runtime.deliver(result) for result in results]
