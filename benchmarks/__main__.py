"""Run the benchmarks one after the other; leave JSON, a page and plots.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks [--quick] [--only NAME ...]

Each script prints its tables and shows its progress as if it ran alone. One that fails, or that takes longer than the
limit, is reported on the page and at the end, and the others go on; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _record
from _page import machine, page, versions
from _plots import draw
from rich.console import Console

HERE = Path(__file__).parent
SCRIPTS = (
    "overhead",
    "run_time",
    "residuals",
    "memory",
    "first_step",
    "xla_steps",
    "hlo",
    "partition",
    "custom_ops",
    "kernels",
)
"""In the order of the page."""

console = Console()


def run(script: str, arguments: list[str], limit: float) -> dict[str, Any]:
    """Run a script in a process group of its own, so that a script that is stopped takes its peers with it.

    Returns:
        `script`, `arguments`, `status` ("done", or what went wrong), `seconds`, `entries` (what it recorded).
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        environment = os.environ | {_record.VARIABLE: str(record)}
        command = [sys.executable, str(HERE / f"{script}.py"), *arguments]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = process.wait(limit)
            status = "done" if code == 0 else f"failed with exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"was stopped after {limit:g} s"
        finally:
            _stop(process)
        entries = _record.read(record)
    seconds = time.perf_counter() - started
    return {"script": script, "arguments": arguments, "status": status, "seconds": seconds, "entries": entries}


def _stop(process: subprocess.Popen) -> None:
    """End what still runs of a script."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write(out: Path, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write one JSON file a script, the plots and the page."""
    out.mkdir(parents=True, exist_ok=True)
    for result in results:
        text = json.dumps({**about, **result}, indent=1)
        (out / f"{result['script']}.json").write_text(text + "\n")
    plots = draw((entry for result in results for entry in result["entries"]), out)
    (out / "README.md").write_text(page(about, results, plots))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it work at all?")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME", help=", ".join(SCRIPTS))
    parser.add_argument("--out", type=Path, help="default: docs/benchmarks, with --quick build/benchmarks")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one script (default: %(default)g)")
    return parser.parse_args()


def main() -> int:
    """Run all, write the results, and say what failed."""
    args = parse()
    out = args.out or HERE.parent / ("build" if args.quick else "docs") / "benchmarks"
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(["python", "benchmarks", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
    }
    started, results = time.perf_counter(), []
    for number, script in enumerate(args.only, 1):
        minutes = (time.perf_counter() - started) / 60
        console.rule(f"{number} of {len(args.only)}: {script}, after {minutes:.1f} minutes")
        results.append(run(script, ["--quick"] * args.quick, args.limit))
        write(out, about | {"seconds": time.perf_counter() - started}, results)  # an interrupted run leaves what it has
    failed = [f"{result['script']} {result['status']}" for result in results if result["status"] != "done"]
    console.rule(f"{out / 'README.md'}: " + ("; ".join(failed) or "all done"))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
