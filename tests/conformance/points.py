"""Special points: samples whose elements are replaced by numbers at which formulas break.

Derivatives are easily right everywhere but at a kink, a pole, a tie or an overflow. At those torch has decided what a gradient
is; each filling below puts such numbers among the elements of all floating-point tensors of a sample.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

TINY = torch.finfo(torch.float32).tiny
LARGEST = 2.0**126  # the largest power whose reciprocal is no subnormal: XLA:CPU takes those for zero
Filling = Callable[[torch.Tensor, int], torch.Tensor]


def _among(values: Sequence[float], every: int = 2) -> Filling:
    """One of the values at every `every`-th element; tensors of a sample take them in another order."""

    def fill(tensor: torch.Tensor, phase: int) -> torch.Tensor:
        flat = tensor.detach().clone().reshape(-1)
        places = torch.arange(flat.numel())[phase % every :: every]
        cycle = torch.tensor(values, dtype=torch.float64).to(flat.dtype)
        flat[places] = cycle[(torch.arange(places.numel()) * (phase + 1) + phase) % len(values)]
        return flat.reshape(tensor.shape)

    return fill


def _one(values: Sequence[float]) -> Filling:
    """One element replaced: what it does to the others shows."""

    def fill(tensor: torch.Tensor, phase: int) -> torch.Tensor:
        flat = tensor.detach().clone().reshape(-1)
        if flat.numel():
            flat[flat.numel() // 2] = values[phase % len(values)]
        return flat.reshape(tensor.shape)

    return fill


def _all(value: float) -> Filling:
    """One value everywhere."""
    return lambda tensor, phase: torch.full_like(tensor.detach(), value)


def _equal_rows(tensor: torch.Tensor, phase: int) -> torch.Tensor:
    """Every row, and every matrix, like the first one."""
    tensor = tensor.detach().clone()
    for dim in range(tensor.ndim - 1):
        tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand(tensor.shape).clone()
    return tensor


FILLINGS: dict[str, Filling] = {
    "zeros": _among([0.0, -0.0]),
    "all_zero": _all(0.0),
    "ones": _among([1.0, -1.0], every=1),
    "all_one": _all(1.0),
    "integers": _among([-2.0, 0.0, 1.0, 3.0, -1.0, 2.0, 5.0], every=1),
    "halves": _among([0.5, -0.5, 1.5, -2.5, 0.0], every=1),
    "equal_rows": _equal_rows,
    "knees": _among([3.0, -3.0, 6.0, 20.0, 20.5, -20.0], every=1),
    "steep": _among([89.0, -89.0, 104.0, -104.0, 120.0, -150.0, 710.0, -710.0]),
    "one_infinite": _one([math.inf, -math.inf]),
    "infinite": _among([math.inf, -math.inf], every=3),
    "one_nan": _one([math.nan]),
    "nan": _among([math.nan, 0.0, math.inf, 1.0], every=2),
    "largest": _one([LARGEST, -LARGEST]),
    "large": _among([1e15, 2e15, 0.0], every=2),
    "smallest": _among([TINY, -TINY], every=2),
    "subnormal": _among([TINY / 8, -TINY / 8], every=2),
}


def fillings(entry: OpInfo) -> dict[str, Filling]:
    """The fillings of an operator: the general ones, and the ends of its domain where the database knows one."""
    low, high = getattr(entry, "domain", (None, None))
    ends = [float(end) for end in (low, high) if end is not None]
    around = [x for end in ends for x in (end, end + 2**-10, end - 2**-10)]
    return FILLINGS | ({"domain": _among(around, every=1)} if around else {})


def filled(sample: SampleInput, filling: Filling) -> SampleInput:
    """A sample with every floating-point tensor filled; a tensor that stands there twice is filled once."""
    phases: dict[int, int] = {}

    @functools.cache
    def fill(leaf: torch.Tensor) -> torch.Tensor:
        new = filling(leaf, phases.setdefault(id(leaf), len(phases)))
        return new.requires_grad_(leaf.requires_grad)

    return sample.transform(lambda leaf: fill(leaf) if _fillable(leaf) else leaf)


def _fillable(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided


@contextlib.contextmanager
def as_xla_computes(name: str) -> Iterator[None]:
    """XLA:CPU takes subnormal numbers for zero; so does torch here, where they are the point or come of the smallest ones."""
    before = torch.tensor([TINY / 2]) * 0.5 == 0
    torch.set_flush_denormal(name in ("subnormal", "smallest") or bool(before))
    try:
        yield
    finally:
        torch.set_flush_denormal(bool(before))
