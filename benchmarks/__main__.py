"""Run the benchmarks one after the other; leave JSON, a page and plots.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks [--quick] [--only NAME ...]

Each script prints its tables and shows its progress as if it ran alone. One that fails, or that takes longer than the
limit, is reported on the page and at the end, and the others go on; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from _page import machine, versions
from _suite import run, write
from rich.console import Console

HERE = Path(__file__).parent
SCRIPTS = (
    "overhead",
    "run_time",
    "train_step",
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
        results.append(run(HERE / f"{script}.py", ["--quick"] * args.quick, args.limit))
        write(out, about | {"seconds": time.perf_counter() - started}, results)  # an interrupted run leaves what it has
    failed = [f"{result['script']} {result['status']}" for result in results if result["status"] != "done"]
    console.rule("done")
    console.print("\n".join([str(out / "README.md"), *failed]))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
