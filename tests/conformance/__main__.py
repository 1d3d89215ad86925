"""Run the whole database in two processes and write the report: `PYTHONPATH=tests python -m conformance`."""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from .cases import DTYPES, cases, dtype_name, entries, supports
from .outcome import Outcome, forget, run
from .report import write_report

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--samples", type=int, default=2, help="samples an operator and dtype")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ops", nargs="*", help="only these operators")
    parser.add_argument("--dtypes", nargs="*", help="only these dtypes", default=[dtype_name(d) for d in DTYPES])
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "conformance.md")
    parser.add_argument("--log", type=Path, help="also write one JSON line a case")
    args = parser.parse_args()
    units = [
        (name, getattr(torch, dtype), args.samples)
        for name, entry in entries().items()
        for dtype in args.dtypes
        if supports(entry, getattr(torch, dtype)) and (not args.ops or name in args.ops)
    ]
    start = time.monotonic()
    outcomes = list(_progress(units, args.processes))
    if args.log:
        args.log.write_text("".join(_line(outcome) for outcome in outcomes))
    write_report(args.report, outcomes, args.samples, time.monotonic() - start)


def _progress(units: list[tuple[str, torch.dtype, int]], processes: int) -> Iterator[Outcome]:
    bar = tqdm(total=len(units), unit="op", smoothing=0.05)
    bad = 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, _start) as pool:
        for future in concurrent.futures.as_completed([pool.submit(_run_unit, *unit) for unit in units]):
            outcomes = future.result()
            bad += sum(outcome.kind in ("wrong", "raised") for outcome in outcomes)
            bar.update()
            bar.set_postfix(bad=bad)
            yield from outcomes


def _start() -> None:
    """One thread a process: the processes are the parallelism."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("torch_xla") is not None:  # before any backward: autograd makes the queues of all devices
        import torch_xla

        torch_xla.device()


def _run_unit(name: str, dtype: torch.dtype, limit: int) -> list[Outcome]:
    outcomes = [run(case, sample) for case, sample in cases(entries()[name], dtype, limit)]
    forget()
    return outcomes


def _line(outcome: Outcome) -> str:
    return json.dumps({"kind": outcome.kind, "case": str(outcome.case), "detail": outcome.detail}) + "\n"


if __name__ == "__main__":
    main()
