"""How a view of a storage is read from, and written into, the value of its base, as ints.

Strides decide everything; which chain of view calls made the tensor does not matter. A view is matched against the
dimensions of its base in memory order; the usual ones (slices, selects, transposes, splits, merges, expansions) become
reshape, slice and transpose, which XLA fuses; whatever does not match (a diagonal, a window) is a gather by computed index.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from pure_backend.ir.geometry import Geometry


class Slices(NamedTuple):
    """A view as slices of its base.

    Read: `base.transpose(order).reshape(shape)[start:limit:step, ...].reshape(picked).transpose(out).reshape(keep)`, then
    broadcast to `size`.

    Attributes:
        order: Permutation that puts the base's dimensions in memory order.
        shape: The base's memory, cut at every stride that the view uses.
        start, limit, step: The slice taken in each dimension of `shape`.
        picked: Shape of the slice with one dimension for each dimension the view walks, in memory order.
        out: Permutation from `picked` to the view's order.
        keep: The view's size with 1 for every dimension that is broadcast.
        size: The view's size.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    start: tuple[int, ...]
    limit: tuple[int, ...]
    step: tuple[int, ...]
    picked: tuple[int, ...]
    out: tuple[int, ...]
    keep: tuple[int, ...]
    size: tuple[int, ...]


class Gather(NamedTuple):
    """A view as indices into the flattened memory of its base: element `i` lies at `offset + sum(i * stride)`."""

    order: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


Access = Slices | Gather


class OutOfBase(ValueError):
    """A view reaches memory that its base does not cover."""


def access_of(base: Geometry, view: Geometry) -> Access:
    """How to find `view` in the value of `base`; both count in elements of one dtype.

    Raises:
        OutOfBase: The view shows elements that are not elements of the base.
    """
    order = tuple(sorted(range(len(base.size)), key=lambda i: (-base.stride[i], -base.size[i], i)))
    memory = [(base.size[i], base.stride[i]) for i in order if base.size[i] != 1]
    if math.prod(view.size) == 0 or math.prod(base.size) == 0:
        return Gather(order, view.size, (0,) * len(view.size), 0)
    inner = _contiguous([n for n, _ in memory])
    strides = [0 if n == 1 else s for n, s in zip(view.size, view.stride, strict=True)]
    offset = _digits(view.offset - base.offset, memory)
    walks = [(n, _digits(s, memory)) for n, s in zip(view.size, strides, strict=True)]
    if not _stays_inside(view.offset - base.offset, list(zip(view.size, strides, strict=True)), _runs(memory)):
        raise OutOfBase(f"a view of size {view.size}, stride {view.stride}, offset {view.offset} leaves its base {base}")
    start, own = _dot(offset, inner), [_dot(digits, inner) for _, digits in walks]
    if start < 0 or start + sum((n - 1) * s for n, s in zip(view.size, own, strict=True)) >= math.prod(base.size):
        raise OutOfBase(f"a view of size {view.size}, stride {view.stride}, offset {view.offset} leaves its base {base}")
    slices = _slices(order, [n for n, _ in memory], inner, view.size, own, start)
    return slices or Gather(order, view.size, tuple(own), start)


def _digits(distance: int, memory: list[tuple[int, int]]) -> list[int]:
    """A distance in storage elements as steps along the base's dimensions, taken in memory order."""
    digits = []
    for _, stride in memory:
        steps, distance = divmod(distance, stride) if stride else (0, distance)
        digits.append(steps)
    if distance:
        raise OutOfBase(f"a distance of {distance} elements falls between the elements of its base")
    return digits


def _runs(memory: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The base's dimensions, joined where one goes on where the next ends: a walk may pass from one to the other."""
    runs: list[tuple[int, int]] = []
    for size, stride in memory:
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


def _stays_inside(offset: int, walks: list[tuple[int, int]], runs: list[tuple[int, int]]) -> bool:
    """Whether no walk leaves a run of the base into the elements between, which are not the base's own."""
    start = _digits(offset, runs)
    steps = [(n, _digits(stride, runs)) for n, stride in walks]
    last = [o + sum((n - 1) * digits[i] for n, digits in steps) for i, o in enumerate(start)]
    return all(o >= 0 and end < size for o, end, (size, _) in zip(start, last, runs, strict=True))


def _dot(digits: list[int], inner: list[int]) -> int:
    return sum(d * s for d, s in zip(digits, inner, strict=True))


def _contiguous(sizes: list[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= n
    return strides[::-1]


def _slices(order, sizes, inner, view_size, strides, offset) -> Slices | None:
    """The view as slices of the base as it is, cut finer, or flat; None if it is a box in none of them."""
    walked = sorted((i for i, n in enumerate(view_size) if n != 1 and strides[i]), key=lambda i: -strides[i])
    walk = [(view_size[i], strides[i]) for i in walked]
    refined = _refined(sizes, inner, [strides[i] for i in walked])
    for shape in (sizes, refined, [math.prod(sizes)]):
        if shape is not None and (cut := _cut(shape, walk, offset)):
            start, limit, step = cut
            picked = tuple(view_size[i] for i in walked)
            kept = [i for i in range(len(view_size)) if i in walked]
            out = tuple(walked.index(i) for i in kept)
            keep = tuple(n if i in walked else 1 for i, n in enumerate(view_size))
            return Slices(order, tuple(shape), start, limit, step, picked, out, keep, tuple(view_size))
    return None


def _refined(sizes: list[int], inner: list[int], strides: list[int]) -> list[int] | None:
    """The base's shape cut additionally at the view's strides, or None where they do not nest."""
    cuts = sorted({*inner, *strides, 1}, reverse=True)
    total = math.prod(sizes)
    if total % cuts[0] or any(big % small for big, small in itertools.pairwise(cuts)):
        return None
    return [total // cuts[0], *(big // small for big, small in itertools.pairwise(cuts))]


def _cut(shape: list[int], walked: list[tuple[int, int]], offset: int) -> tuple[tuple[int, ...], ...] | None:
    """Slice bounds in each dimension of `shape`, or None where the view is no box of slices there."""
    own = _contiguous(list(shape))
    start, limit, step = [], [], []
    for stride in own:
        digit, offset = divmod(offset, stride)
        start.append(digit)
        limit.append(digit + 1)
        step.append(1)
    used = len(shape)
    for n, stride in reversed(walked):  # innermost first
        dim = next((d for d in range(used - 1, -1, -1) if stride % own[d] == 0 and stride < own[d] * shape[d]), None)
        if dim is None:
            return None
        step[dim] = stride // own[dim]
        if start[dim] + (n - 1) * step[dim] < shape[dim]:
            limit[dim] = start[dim] + (n - 1) * step[dim] + 1
            used = dim
            continue
        if step[dim] != 1:
            return None
        while n > 1 and dim >= 0:  # the walk covers this dimension whole and goes on in the next outer one
            if start[dim] and n > shape[dim] - start[dim]:
                return None
            if n >= shape[dim]:
                if n % shape[dim] or start[dim]:
                    return None
                limit[dim], n = shape[dim], n // shape[dim]
            else:
                limit[dim], n = start[dim] + n, 1
            used, dim = dim, dim - 1
        if n > 1:
            return None
    return tuple(start), tuple(limit), tuple(step)
