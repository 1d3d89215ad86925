"""Values as keys: equal keys stand for values that no function tells apart."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Hashable
from typing import Any

import numpy as np


def exact(value: Any) -> Hashable:
    """A key of a constant: 1, 1.0 and True have different ones, so have 0.0 and -0.0; a NaN has its own.

    Args:
        value: Anything that can be hashed. Numbers within tuples, frozen sets and frozen dataclasses count as numbers do.

    Raises:
        TypeError: It cannot be hashed.
    """
    kind = type(value)
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if isinstance(value, float):
        return kind, float.__repr__(value) if value == value else struct.pack("d", value).hex()
    if isinstance(value, complex):
        return kind, exact(value.real), exact(value.imag)
    if isinstance(value, tuple):
        return kind, *map(exact, value)
    if isinstance(value, frozenset):
        return kind, frozenset(map(exact, value))
    hash(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.eq:  # type: ignore[attr-defined]
        return kind, *(exact(getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare)
    return kind, value


class Same:
    """Equal to the same object only, which it keeps alive: an id alone may be given to another object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)
