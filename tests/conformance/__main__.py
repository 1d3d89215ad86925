"""Run the whole database in two processes and write the report: `PYTHONPATH=tests python -m conformance`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from .cases import DTYPES, case_named, dtype_name, entries, supports
from .outcome import Outcome
from .parallel import run_units
from .report import write_report

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--samples", type=int, default=1, help="samples an operator and dtype")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ops", nargs="*", help="only these operators")
    parser.add_argument("--dtypes", nargs="*", help="only these dtypes", default=[dtype_name(d) for d in DTYPES])
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "conformance.md")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="also write one JSON line a case, as they come")
    parser.add_argument("--resume", action="store_true", help="take up an interrupted run from its log")
    args = parser.parse_args()
    units = [
        (name, getattr(torch, dtype), args.samples)
        for name, entry in entries().items()
        for dtype in args.dtypes
        if supports(entry, getattr(torch, dtype)) and (not args.ops or name in args.ops)
    ]
    outcomes = _outcomes(args.log) if args.resume else []
    done = {(outcome.case.op, outcome.case.dtype) for outcome in outcomes}
    with args.log.open("a" if args.resume else "w", buffering=1) as log:
        for outcome in run_units([unit for unit in units if unit[:2] not in done], args.processes):
            outcomes.append(outcome)
            log.write(_line(outcome))
    write_report(args.report, outcomes, args.samples)


def _line(outcome: Outcome) -> str:
    return json.dumps({"kind": outcome.kind, "case": str(outcome.case), "detail": outcome.detail}) + "\n"


def _outcomes(log: Path) -> list[Outcome]:
    lines = map(json.loads, log.read_text().splitlines())
    return [Outcome(case_named(line["case"]), line["kind"], line["detail"]) for line in lines]


if __name__ == "__main__":
    main()
