"""Repetitions in a sequence, found by doubling windows: n log n steps for n items, whatever repeats in them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Repetition(NamedTuple):
    """Equal stretches of a sequence.

    Attributes:
        starts: Where they begin; at least two, apart from each other.
        length: How long each is.
    """

    starts: tuple[int, ...]
    length: int

    @property
    def saved(self) -> int:
        """How many items need not be looked at twice."""
        return self.length * (len(self.starts) - 1)


def repetitions(items: Sequence[Hashable], shortest: int) -> list[Repetition]:
    """Repeated stretches without overlap, the largest saving first.

    Windows of 1, 2, 4, ... items get a number each, from the numbers of their halves. Where windows of one width equal those a
    constant distance before them, a stretch is repeated: as often as the distance fits if it is longer than the distance (a
    chain of layers), twice otherwise (a function that is called again). Stretches with the same items are one repetition.

    Args:
        items: What is compared.
        shortest: The least length of a stretch.
    """
    numbers = _numbered(items)
    found: dict[tuple[int, ...], set[int]] = {}
    ranks, width = numbers, 1
    while 2 * width <= len(items):
        if 2 * width > shortest:
            for first, second, length in _matches(ranks, width):
                if length >= shortest:
                    once = min(second - first, length)
                    starts = range(first, second + length - once + 1, second - first)
                    found.setdefault(tuple(numbers[first : first + once]), set()).update(starts)
        ranks, width = _numbered([(ranks[i], ranks[i + width]) for i in range(len(ranks) - width)]), 2 * width
    candidates = [Repetition(tuple(sorted(starts)), len(stretch)) for stretch, starts in found.items()]
    return _disjoint(sorted(candidates, key=lambda c: (-c.saved, c.length)), len(items))


def _numbered(items: Sequence[Hashable]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [known.setdefault(item, len(known)) for item in items]


def _matches(ranks: Sequence[int], width: int) -> list[tuple[int, int, int]]:
    """`(first, second, length)`: two stretches with the same items, at least `width` apart and as long as can be."""
    last: dict[int, int] = {}
    matches: list[tuple[int, int, int]] = []
    begun = gap = 0  # the present run: windows from `begun` on are the same as those `gap` before them
    for i in range(len(ranks) + 1):
        if i >= width:
            last[ranks[i - width]] = i - width
        now = i - last.get(ranks[i], i) if i < len(ranks) else 0
        if now != gap:
            if gap:
                matches.append((begun - gap, begun, i - begun + width - 1))
            begun, gap = i, now
    return matches


def _disjoint(candidates: Sequence[Repetition], length: int) -> list[Repetition]:
    taken = [False] * length
    chosen = []
    for candidate in candidates:
        starts: list[int] = []
        for start in candidate.starts:
            apart = not starts or start >= starts[-1] + candidate.length
            if apart and not any(taken[start : start + candidate.length]):
                starts.append(start)
        if len(starts) > 1:
            chosen.append(Repetition(tuple(starts), candidate.length))
            for start in starts:
                taken[start : start + candidate.length] = [True] * candidate.length
    return chosen
