"""How far values are from eager's, and how far they may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend import _compat
from pure_backend.ir.describe import describe_tensor, tensor_leaves
from pure_backend.ir.facts import facts

# Largest error of one node, relative to the largest value that it should have. A whole graph adds up such errors.
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_SINGLE, _SINGLE_FAST, _EIGHT_BITS = 3e-5, 1e-2, 0.2
_CANCELLATION = 16  # units in the last place of the largest input, for sums in which large terms cancel


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that is not what eager has.

    Attributes:
        what: What it is.
        error: The largest difference, infinite where shapes, dtypes or special values differ.
        text: The difference in words.
        exact: Whether it is of integers, which rounding elsewhere may have moved.
    """

    what: str
    error: float
    text: str
    exact: bool = False


def compare_calls(
    got: Any, want: Any, args: Sequence[Any], copies: Sequence[Any], plan: Any, bounds: Bounds, comparable: bool
) -> Iterator[Difference]:
    """What outputs and written inputs of a call differ from eager's."""
    pairs = [
        (f"output {i}", *pair) for i, pair in enumerate(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True))
    ]
    pairs += [(f"input {w.input} after the call", args[w.input], copies[w.input]) for w in plan.write_backs]
    for what, ours, eager in pairs:
        if isinstance(eager, torch.Tensor) and (difference := compare(what, ours, eager, bounds, comparable)):
            yield difference


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How far values may be off."""

    relative: float
    absolute: float

    @classmethod
    def of(cls, nodes: Iterable[fx.Node], inputs: Any, factor: float = 1) -> Bounds:
        """Bounds for what these nodes compute from these inputs, by the least precise dtype among them."""
        nodes = [inner for node in nodes for inner in _with_bodies(node)]
        autocast = [dtype for node in nodes for _, dtype in facts(node).autocast]
        fakes = [tensor for node in nodes for tensor in tensor_leaves(facts(node).value)]
        dtypes = {tensor.dtype for tensor in [*fakes, *tensors_in(inputs)]} | set(autocast)
        floats = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
        relative = factor * max(map(_tolerance, floats), default=0.0)
        largest = max((float(_for_comparison(t).abs().nan_to_num(0, 0, 0).max()) for t in _floats(inputs)), default=0.0)
        epsilon = 0.0 if relative > 1e-3 else max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
        return cls(relative, factor * _CANCELLATION * epsilon * largest + 1e-3 * relative)


def _with_bodies(node: fx.Node) -> Iterator[fx.Node]:
    """A node and those of the graphs inside it."""
    yield node
    for body in facts(node).bodies:
        for inner in body.graph.nodes:
            yield from _with_bodies(inner)


def _floats(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(value) if (t.is_floating_point() or t.is_complex()) and t.numel() and not t.is_meta]


def compare(what: str, got: torch.Tensor, want: torch.Tensor, bounds: Bounds, values: bool = True) -> Difference | None:
    """How a tensor differs from eager's, or None if it does not."""
    if got.shape != want.shape or got.dtype != want.dtype:
        text = f"{what} is {describe_tensor(got)}, in eager {describe_tensor(want)}"
        return Difference(what, float("inf"), text)
    if not values or not want.numel() or want.is_meta:
        return None
    ours, eager = _for_comparison(got), _for_comparison(want)
    if not (want.is_floating_point() or want.is_complex()):
        count = int((ours != eager).sum())
        return Difference(what, float(count), f"{what} has {count} other values than in eager", True) if count else None
    special = ~(torch.isfinite(eager) & torch.isfinite(ours))
    if not torch.equal(ours[special].nan_to_num(7.0, 8.0, 9.0), eager[special].nan_to_num(7.0, 8.0, 9.0)):
        return Difference(what, float("inf"), f"{what} has NaN or infinity in other places than eager")
    ours, eager = ours[~special], eager[~special]
    if not ours.numel():
        return None
    error, allowed = float((ours - eager).abs().max()), bounds.absolute + bounds.relative * float(eager.abs().max())
    return Difference(what, error, f"{what} is off by up to {error:.3g}; {allowed:.3g} is allowed") if error > allowed else None


def _for_comparison(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _tolerance(dtype: torch.dtype) -> float:
    if dtype in (torch.float32, torch.complex64):
        return _SINGLE if _compat.float32_matmul_precision() == "highest" else _SINGLE_FAST
    return _TOLERANCE.get(dtype, _EIGHT_BITS)


def tensors_in(value: Any) -> list[Any]:
    """The tensors, or arrays, in a value; torch's own named tuples are not all known to its pytrees."""
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (torch.Tensor, jax.Array))]
