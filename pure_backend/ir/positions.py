"""Values at some positions of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def with_values(full: Iterable[Any], positions: Sequence[int], values: Iterable[Any]) -> list[Any]:
    """A list with these values at these positions: what a derivative by some arguments calls its function with."""
    full = list(full)
    for position, value in zip(positions, values, strict=True):
        full[position] = value
    return full
