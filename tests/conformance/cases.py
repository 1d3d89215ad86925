"""Which cases there are: an operator, a dtype, a memory layout, the number of a sample."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import noncontiguous_like
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.complex64)
LAYOUTS = ("contiguous", "strided")
SAMPLE_SEED = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One sample of one operator.

    Attributes:
        op: Its name in the database, with the variant.
        dtype: Dtype of the sample.
        layout: "contiguous" as sampled, or "strided": every tensor with gaps between its elements.
        number: Which sample.
        inplace: Whether the in-place method is called instead.
        dynamo: Whether Dynamo makes the graph; else it is one node.
        points: The filling with special points (`points.py`); "" for the sample as it is.
    """

    op: str
    dtype: torch.dtype
    layout: str = "contiguous"
    number: int = 0
    inplace: bool = False
    dynamo: bool = False
    points: str = ""

    def __str__(self) -> str:
        marks = [name for name in ("inplace", "dynamo") if getattr(self, name)] + ([f"at-{self.points}"] if self.points else [])
        return "-".join([self.op, dtype_name(self.dtype), self.layout, str(self.number), *marks])


def case_named(name: str) -> Case:
    """The inverse of `str(case)`."""
    found = re.fullmatch(r"(.+)-(\w+)-(contiguous|strided)-(\d+)(-inplace)?(-dynamo)?(?:-at-(\w+))?", name)
    assert found, f"no case is called {name!r}"
    op, dtype, layout, number, inplace, dynamo, points = found.groups()
    return Case(op, getattr(torch, dtype), layout, int(number), bool(inplace), bool(dynamo), points or "")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def entries() -> dict[str, OpInfo]:
    """The database by name."""
    return {entry.formatted_name: entry for entry in op_db}


def supports(entry: OpInfo, dtype: torch.dtype) -> bool:
    """Whether eager torch has the operator for a dtype on the CPU."""
    return dtype in entry.supported_dtypes("cpu")


def needs_grad(entry: OpInfo, dtype: torch.dtype) -> bool:
    """Whether eager torch has the operator's gradient for a dtype on the CPU."""
    return entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")


def samples(entry: OpInfo, dtype: torch.dtype, *, grad: bool) -> Iterator[SampleInput]:
    """Torch's samples, the same ones each time; torch itself cannot make some of them on every version."""
    torch.manual_seed(SAMPLE_SEED)
    return entry.sample_inputs("cpu", dtype, requires_grad=grad)


def cases(entry: OpInfo, dtype: torch.dtype, limit: int) -> Iterator[tuple[Case, SampleInput]]:
    """The first samples of an operator in both layouts; the first one also in place and, in f32, through Dynamo."""
    grad = needs_grad(entry, dtype)
    name = entry.formatted_name
    for number, sample in enumerate(itertools.islice(samples(entry, dtype, grad=grad), limit)):
        yield Case(name, dtype, "contiguous", number), sample
        yield Case(name, dtype, "strided", number), strided(sample)
        if number == 0:
            if dtype is torch.float32:  # a smaller share: Dynamo does not look at dtypes, and takes most of the time
                yield Case(name, dtype, dynamo=True), sample
            if entry.inplace_variant is not None and not kills_eager(entry, dtype):
                yield Case(name, dtype, inplace=True), sample


def kills_eager(entry: OpInfo, dtype: torch.dtype) -> bool:
    """Whether eager torch itself ends the process: `mvlgamma_` divides by zero in C++ for integers."""
    return entry.name == "mvlgamma" and not (dtype.is_floating_point or dtype.is_complex)


class NoSample(LookupError):
    """Torch makes fewer samples of an operator than a case's number."""


def sample_of(case: Case) -> SampleInput:
    """The sample of a case.

    Raises:
        NoSample: There is none of that number.
    """
    entry = entries()[case.op]
    made = samples(entry, case.dtype, grad=needs_grad(entry, case.dtype))
    sample = next(itertools.islice(made, case.number, None), None)
    if sample is None:
        raise NoSample(str(case))
    return strided(sample) if case.layout == "strided" else sample


def strided(sample: SampleInput) -> SampleInput:
    """The same values, every dense tensor with gaps between its elements."""
    return sample.transform(lambda leaf: noncontiguous_like(leaf) if _is_dense(leaf) else leaf)


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def function_of(case: Case) -> Any:
    """The function that a case calls."""
    entry = entries()[case.op]
    return entry.inplace_variant if case.inplace else entry.op


def point_samples(entry: OpInfo, dtype: torch.dtype, limit: int = 6) -> Iterator[tuple[int, SampleInput]]:
    """Samples for special points: the first of each set of options, of at least two and of at most a few hundred elements."""
    seen: set[str] = set()
    for number, sample in enumerate(samples(entry, dtype, grad=needs_grad(entry, dtype))):
        leaves, _ = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        options = str([leaf if not isinstance(leaf, torch.Tensor) else leaf.dtype for leaf in leaves])
        if sizes and 2 <= max(sizes) <= 4000 and options not in seen:
            seen.add(options)
            yield number, sample
        if len(seen) == limit:
            return
