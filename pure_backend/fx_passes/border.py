"""Where a call with wrapper subclasses meets a graph of plain tensors: taken apart on the way in, wrapped on the way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.errors import UnsupportedOperatorError
from pure_backend.ir.opaque import opaque
from pure_backend.ir.wrapper import Structure


@dataclasses.dataclass(frozen=True)
class Carrier:
    """Plain inputs that no node reads: they only carry the gradient of a wrapper back.

    Attributes:
        input: The position of the wrapper among the arguments.
        structure: That of the gradient, None if it is a plain tensor.
        likes: Shape and dtype of the gradient's pieces.
    """

    input: int
    structure: Structure | None
    likes: tuple[tuple[torch.Size, torch.dtype], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Border:
    """A graph of plain tensors, and how a call of the graph with wrappers becomes a call of it.

    Its inputs are the arguments with each wrapper's pieces in its place, the carriers, and constants. Its outputs are distinct
    values, with the pieces of each wrapper in its place.

    Attributes:
        gm: The graph.
        structures: For each argument its structure, None if it is no wrapper.
        carriers: See `Carrier`.
        constants: Tensors that operators on wrappers make of Python numbers.
        slots: For each distinct value that the caller gets: the argument that it is (an int), the structure of a wrapper, or
            None for a value as it is.
        leaves: For each leaf of the original output the slot it is.
        out_spec: The pytree of the original output.
    """

    gm: fx.GraphModule
    structures: tuple[Structure | None, ...]
    carriers: tuple[Carrier, ...]
    constants: tuple[torch.Tensor, ...]
    slots: tuple[int | Structure | None, ...]
    leaves: tuple[int, ...]
    out_spec: pytree.TreeSpec

    def enter(self, args: Sequence[Any]) -> list[Any]:
        """The graph's inputs."""
        flat: list[Any] = []
        with torch._C.DisableTorchFunctionSubclass():
            for structure, arg in zip(self.structures, args, strict=True):
                flat += [arg] if structure is None else structure.pieces(arg)
        if self.carriers:
            inputs = list(dict.fromkeys(carrier.input for carrier in self.carriers))
            flat += _Carry.apply(self.carriers, inputs, *(args[i] for i in inputs))
        return [*flat, *self.constants]

    def leave(self, args: Sequence[Any], results: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        remaining = iter(results)
        values = [_value(slot, args, remaining) for slot in self.slots]
        return pytree.tree_unflatten([values[i] for i in self.leaves], self.out_spec)


def _value(slot: int | Structure | None, args: Sequence[Any], results: Any) -> Any:
    if isinstance(slot, int):
        return args[slot]
    return next(results) if slot is None else slot.wrap(results)


class _Carry(torch.autograd.Function):
    """Wrappers -> carriers; backward: the gradients of the carriers -> gradients of the wrappers, of the class eager gives."""

    @staticmethod
    def forward(ctx: Any, carriers: tuple[Carrier, ...], inputs: list[int], *wrappers: torch.Tensor) -> tuple:
        ctx.carriers, ctx.inputs = carriers, inputs
        ctx.set_materialize_grads(False)
        devices = {i: wrapper.device for i, wrapper in zip(inputs, wrappers, strict=True)}
        return tuple(torch.empty(s, dtype=t, device=devices[c.input]) for c in carriers for s, t in c.likes)

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        remaining = iter(grads)
        found: dict[int, Any] = {}
        for carrier in ctx.carriers:
            grad = _gradient(carrier, [next(remaining) for _ in carrier.likes])
            if grad is not None:
                found[carrier.input] = grad if carrier.input not in found else found[carrier.input] + grad
        return (None, None, *(found.get(i) for i in ctx.inputs))


def _gradient(carrier: Carrier, pieces: list[torch.Tensor | None]) -> torch.Tensor | None:
    if all(piece is None for piece in pieces):
        return None
    if carrier.structure is None:
        return pieces[0]
    if torch.is_grad_enabled():
        raise UnsupportedOperatorError(f"a second derivative by a {carrier.structure.cls.__name__}: run it in eager")
    zeros = [
        torch.zeros(shape, dtype=dtype) if p is None else p for p, (shape, dtype) in zip(pieces, carrier.likes, strict=True)
    ]
    return carrier.structure.wrap(iter(zeros))
