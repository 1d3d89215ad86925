"""Peers measured side by side: interleaved rounds in one process, medians with spread, tables that paste into Markdown."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import _record
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

console = Console(width=120)
os.environ["PURE_BACKEND_CACHE_DIR"] = ""  # first calls are measured too


class Seconds(NamedTuple):
    """One call: elapsed time, and CPU time of all threads of the process, which other processes disturb less."""

    wall: float
    cpu: float


Samples = dict[str, list[Seconds]]
"""The calls of each peer; the n-th ones belong to the same round."""


def arguments(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it work at all?")
    parser.add_argument("--rounds", type=int, default=rounds, help="calls of every peer (default: %(default)s)")
    return parser


def warm(
    peers: Mapping[str, Callable[[], object]], after: Callable[[], object] | None = None, calls: int = 3
) -> dict[str, float]:
    """Call every peer a few times to let it compile.

    Returns:
        Seconds of each peer's first call with what comes after it.
    """
    first = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(peers))
        for name, peer in peers.items():
            progress.update(task, description=f"compiling {name}")
            started = time.perf_counter()
            _time(peer, after)
            first[name] = time.perf_counter() - started
            for _ in range(calls - 1):
                _time(peer, after)
            progress.advance(task)
    return first


def measure(
    peers: Mapping[str, Callable[[], object]],
    rounds: int,
    after: Callable[[], object] | None = None,
) -> Samples:
    """Time one call of every peer in each round, each round starting with another peer.

    Args:
        peers: What to call.
        rounds: How often.
        after: Called after each call, outside the time: what finishes or cleans up.
    """
    names = list(peers)
    samples: Samples = {name: [] for name in names}
    gc.collect()  # what compiling left behind is nobody's to pay for
    with Progress(console=console, transient=True) as progress:
        for i in progress.track(range(rounds), description="measuring"):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                _time(peers[name], after)  # not timed: no peer pays for caches and threads of the one before
                samples[name].append(_time(peers[name], after))
    return samples


def measure_alone(name: str, peer: Callable[[], object], rounds: int, after: Callable[[], object] | None = None) -> Samples:
    """Warm and time a peer before the others have run; what they leave on the heap slows it down later."""
    peers = {f"{name} alone": peer}
    warm(peers, after)
    return measure(peers, rounds, after)


def _time(peer: Callable[[], object], after: Callable[[], object] | None) -> Seconds:
    cpu, started = time.process_time(), time.perf_counter()
    result = peer()
    if after is None:  # who frees a result at once, and who at the next call, pays for it here
        del result
    seconds = Seconds(time.perf_counter() - started, time.process_time() - cpu)
    if after is not None:
        after()
    return seconds


def difference(samples: Samples, peer: str, base: str) -> float:
    """Median of the seconds that a peer needs more than another one in the same round."""
    return statistics.median(a.wall - b.wall for a, b in zip(samples[peer], samples[base], strict=True))


def ratio(samples: Samples, peer: str, base: str, clock: str = "wall") -> float:
    """Median of a peer in units of the median of another one."""
    return median(samples[peer], clock) / median(samples[base], clock)


def median(seconds: Sequence[Seconds], clock: str = "wall") -> float:
    """Median by one of the two clocks."""
    return statistics.median(getattr(s, clock) for s in seconds)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median": middle, "low": low, "high": high, "least": min(seconds), "rounds": len(seconds)}


def summary(seconds: Sequence[float], scale: float) -> tuple[str, str, str]:
    """Median, quartiles and minimum as text, in units of `1 / scale` seconds."""
    spread = _spread(seconds)
    low, middle, high, least = (scale * spread[name] for name in ("low", "median", "high", "least"))
    digits = 1 if abs(middle) >= 100 else 2
    return f"{middle:.{digits}f}", f"{low:.{digits}f}..{high:.{digits}f}", f"{least:.{digits}f}"


def report(title: str, samples: Samples, base: str, unit: str = "ms", notes: Mapping[str, str] | None = None) -> None:
    """Print a table of peers, with the ratio of each median to that of `base`."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    rows = [
        (
            name,
            *summary([s.wall for s in seconds], scale),
            f"{ratio(samples, name, base):.3g}",
            summary([s.cpu for s in seconds], scale)[0],
            (notes or {}).get(name, ""),
        )
        for name, seconds in samples.items()
    ]
    print_table(title, ("peer", f"median {unit}", "quartiles", "min", f"/ {base}", f"CPU {unit}", "note"), rows)
    _record.samples(title, {name: _spread([s.wall for s in seconds]) for name, seconds in samples.items()})


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table; a last column without any text is left out."""
    rows = list(rows)
    if not any(row[-1] for row in rows):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    table = Table(box=MARKDOWN)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 or heading == "note" else "right")
    for row in rows:
        table.add_row(*row)
    with console.capture() as text:  # the box has an empty line above and below
        console.print(table)
    console.print(f"\n**{title}**\n")
    console.print(text.get().strip(), highlight=False)
    _record.table(title, list(headings), [list(row) for row in rows])


def verdict(what: str, value: float, target: float, unit: str, at_most: bool = True) -> None:
    """Print whether a target is met."""
    met = value <= target if at_most else value >= target
    limit = "at most" if at_most else "at least"
    text = f"{what} is {value:.3g} {unit}, target {limit} {target:g} {unit}"
    console.print(f"\n{'MET' if met else 'MISSED'}: {text}")
    _record.verdict(text, value, target, unit, met)


def remark(text: str) -> None:
    """Print a line that belongs to the results."""
    console.print(f"\n{text}")
    _record.note(text)


def print_machine() -> None:
    """Print what else the machine does: timings on a loaded one are to be read with care."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    console.print(f"{os.cpu_count()} cores, load average {load}, {time.strftime('%Y-%m-%d %H:%M')}")
