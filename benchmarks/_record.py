"""What a script finds, as data beside what it prints: one JSON object a line.

The file is named by `PURE_BACKEND_BENCH_RECORD`; without it nothing is written. Lines are written one by one, so that a script
that fails leaves what it had found.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "PURE_BACKEND_BENCH_RECORD"

Entry = dict[str, Any]
"""A line: `kind`, and what belongs to that kind (see `table`, `samples`, `verdict`, `point` and `note`)."""


def _write(kind: str, **fields: Any) -> None:
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


def table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """A table, as printed."""
    _write("table", title=title, headings=headings, rows=rows)


def samples(title: str, seconds: dict[str, dict[str, float]]) -> None:
    """By peer: `median`, `low` and `high` quartile, `least` of the seconds of its calls, `rounds`."""
    _write("samples", title=title, seconds=seconds)


def verdict(text: str, value: float, target: float, unit: str, met: bool) -> None:
    """A figure beside its target."""
    _write("verdict", text=text, value=value, target=target, unit=unit, met=met)


def note(text: str) -> None:
    """A line of text."""
    _write("note", text=text)


def point(figure: str, series: str, x: float | str, y: float) -> None:
    """A point of a plot; see `_plots.FIGURES`.

    Args:
        figure: The plot.
        series: The line that the point is on, or the colour of the bar.
        x: Where it is, or the name of the group of bars.
        y: How high it is.
    """
    _write("point", figure=figure, series=series, x=x, y=y)


def read(path: Path) -> list[Entry]:
    """The lines of a file; none if a script wrote nothing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
