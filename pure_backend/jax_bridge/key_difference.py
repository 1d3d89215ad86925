"""Why a program was not found: how its key differs from the nearest known key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_SHOWN = 3


def key_difference(key: Any, known: Iterable[Any]) -> str:
    """The lines in which a key differs from the nearest known key, in words."""
    lines = list(_lines(key))
    alike = [other for other in map(list, map(_lines, known)) if len(other) == len(lines)]
    if not alike:
        return "no program of as many nodes is known"
    nearest = min(alike, key=lambda other: len(_changes(other, lines)))
    changes = _changes(nearest, lines)
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return "against the nearest program, " + "; ".join(changes[:_SHOWN]) + more


Line = tuple[str, str]


def _changes(old: list[Line], new: list[Line]) -> list[str]:
    return [f"{part}: {a} became {b}" for (_, a), (part, b) in zip(old, new, strict=True) if a != b]


def _lines(value: Any, part: str = "key") -> Iterator[Line]:
    """A key as lines of text, each with the name of the part that it is in."""
    if isinstance(value, str):
        yield from ((part, line) for line in value.splitlines())
    elif isinstance(value, tuple) and value:
        names = getattr(value, "_fields", [part] * len(value))
        for name, inner in zip(names, value, strict=True):
            yield from _lines(inner, name)
    else:
        yield part, str(value)
