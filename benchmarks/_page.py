"""The page of the suite: machine, versions, plots, and the tables of every script."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from _record import Entry

_PACKAGES = ("torch", "torch_xla", "jax", "jaxlib", "torchax", "torchvision", "transformers", "numpy")


def machine() -> dict[str, str]:
    """What it runs on."""
    return {
        "CPU": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "load average at the start": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Python, and the packages that are installed."""
    installed = {d.metadata["Name"].replace("-", "_"): d.version for d in importlib.metadata.distributions()}
    return {"Python": platform.python_version()} | {name: installed[name] for name in _PACKAGES if name in installed}


def _processor() -> str:
    """The model that Linux names; `platform.processor()` is empty there."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def page(about: Mapping[str, Any], results: list[dict[str, Any]], plots: Mapping[str, str]) -> str:
    """The Markdown page.

    Args:
        about: `date`, `command`, `seconds`, `machine` and `versions`.
        results: What each script left: `script`, `status`, `seconds`, `entries`.
        plots: File names by title.
    """
    return "\n".join(_lines(about, results, plots)).rstrip() + "\n"


def _lines(about: Mapping[str, Any], results: list[dict[str, Any]], plots: Mapping[str, str]) -> Iterator[str]:
    yield from ("# Benchmark results", "")
    yield f"Written by `{about['command']}` on {about['date']}, in {about['seconds'] / 60:.1f} minutes; not edited."
    yield from ("[benchmarks/README.md](../../benchmarks/README.md) says what each script measures and how to read it.", "")
    yield from _table(["machine", ""], [[name, text] for name, text in about["machine"].items()])
    yield from _table(["version", ""], [[name, text] for name, text in about["versions"].items()])
    yield from _targets(results)
    for title, name in plots.items():
        yield from (f"![{title}]({name})", "")
    for result in results:
        yield from _section(result)


def _targets(results: list[dict[str, Any]]) -> Iterator[str]:
    rows = [
        [result["script"], entry["text"], "met" if entry["met"] else "**missed**"]
        for result in results
        for entry in result["entries"]
        if entry["kind"] == "verdict"
    ]
    yield from ("## Targets", "")
    yield from _table(["script", "measured", ""], rows)


def _section(result: dict[str, Any]) -> Iterator[str]:
    yield from (f"## {result['script']}", "")
    if result["status"] != "done":
        yield from (f"**This script {result['status']}**; what follows it had found by then.", "")
    for entry in result["entries"]:
        yield from _entry(entry)
    yield from (f"{result['seconds']:.0f} s in all, see [{result['script']}.json]({result['script']}.json).", "")


def _entry(entry: Entry) -> Iterator[str]:
    if entry["kind"] == "table":
        yield from (f"**{entry['title']}**", "")
        yield from _table(entry["headings"], entry["rows"])
    elif entry["kind"] == "note":
        yield from (entry["text"], "")


def _table(headings: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
