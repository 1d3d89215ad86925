"""The plots of the suite: points that scripts recorded, as lines over depth or as groups of bars."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from _record import Entry
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Plot:
    """How a plot is drawn.

    Attributes:
        title: What it shows.
        y: Quantity and unit of its height.
        bars: Whether each `x` is the name of a group of bars; otherwise it is a number of layers.
        logarithmic: Whether the height has a logarithmic scale.
    """

    title: str
    y: str
    bars: bool = False
    logarithmic: bool = True


FIGURES = {
    "host-time-forward": Plot("Host time of a call on xla tensors, no grad", "ms"),
    "host-time-training": Plot("Host time of forward + backward on xla tensors", "ms"),
    "first-step": Plot("First training step on xla tensors, with all compilation", "s"),
    "backend-time": Plot("First training step on plain tensors: the backend's part", "s"),
    "run-time": Plot("Run time on plain CPU tensors", "in units of eager's", bars=True, logarithmic=False),
    "residuals": Plot("What the forward keeps for the backward, beside inputs", "MB", bars=True, logarithmic=False),
}
"""By the name that scripts give to `_record.point`."""


def draw(entries: Iterable[Entry], folder: Path) -> dict[str, str]:
    """Draw every plot that has points.

    Returns:
        File names by title.
    """
    points = [entry for entry in entries if entry["kind"] == "point"]
    drawn = {}
    for name, plot in FIGURES.items():
        if chosen := [point for point in points if point["figure"] == name]:
            _save(plot, chosen, folder / f"{name}.svg")
            drawn[plot.title] = f"{name}.svg"
    return drawn


def _save(plot: Plot, points: list[Entry], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    (_bars if plot.bars else _lines)(axes, points)
    axes.set(title=plot.title, ylabel=plot.y)
    if plot.logarithmic:
        axes.set_yscale("log")
    axes.grid(axis="y", which="both", alpha=0.3)
    axes.legend(fontsize="small")
    with matplotlib.rc_context({"svg.hashsalt": "pure_backend"}):  # equal points give equal files
        figure.savefig(path, metadata={"Date": None})


def _lines(axes: Axes, points: list[Entry]) -> None:
    for series in _names(points, "series"):
        line = sorted((p["x"], p["y"]) for p in points if p["series"] == series)
        axes.plot(*zip(*line, strict=True), marker="o", label=series)
    axes.set_xlabel("layers")


def _bars(axes: Axes, points: list[Entry]) -> None:
    groups, every = _names(points, "x"), _names(points, "series")
    width = 0.8 / len(every)
    for i, series in enumerate(every):
        height = {p["x"]: p["y"] for p in points if p["series"] == series}
        places = [(n + i * width, height[group]) for n, group in enumerate(groups) if group in height]
        drawn = axes.bar(*zip(*places, strict=True), width=width, label=series)
        axes.bar_label(drawn, fmt="%.3g", fontsize="x-small")
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(groups))], groups, fontsize="small", wrap=True)


def _names(points: list[Entry], field: str) -> list[str]:
    return list(dict.fromkeys(point[field] for point in points))
