"""docs/conformance.md: totals, what is left to eager and why, and the table of operator by dtype."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .cases import DTYPES, dtype_name
from .latitude import UNDETERMINED
from .outcome import Outcome

_KINDS = ("compiled", "eager", "wrong", "raised")
_HEAD = """# Conformance with eager torch

Written by `make conformance`; do not edit. Oracle: torch's operator database (`op_db`), version {version}, CPU. Each operator
is run with {samples} of torch's own samples for each dtype, contiguous and strided, the first also in place and
(in float32) through Dynamo; values, dtypes, shapes, `requires_grad`, writes to inputs and gradients are compared with eager
(`tests/conformance`): {cases} cases.

- **compiled**: equal to eager. **eager**: left to eager torch, for the reason given below.
- **wrong**: differs from eager. **raised**: compiling or running raised where eager does not.
- Cases in which eager itself raises are left out.
"""


def write_report(path: Path, outcomes: Sequence[Outcome], samples: int) -> None:
    """Write the report."""
    seen = [outcome for outcome in outcomes if outcome.kind != "skipped" and not outcome.case.points]
    special = [outcome for outcome in outcomes if outcome.kind != "skipped" and outcome.case.points]
    head = _HEAD.format(
        version=torch.__version__, samples="the first" if samples == 1 else f"the first {samples}", cases=len(seen)
    )
    points = [_POINTS, _by_filling(special), _UNDETERMINED, _undetermined()] if special else []
    parts = [
        head,
        "## Totals",
        _totals(seen),
        *points,
        *_faults([*seen, *special]),
        "## Left to eager",
        _reasons(seen),
        "## Operators",
        _table(seen),
    ]
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


_POINTS = """## Special points

Samples of each operator in float32, filled with numbers at which formulas break (`tests/conformance/points.py`): values and
gradients have to be NaN, infinite and close where eager's are."""
_UNDETERMINED = "Not compared, because eager itself does not determine it (`tests/conformance/latitude.py`):"


def _by_filling(outcomes: Iterable[Outcome]) -> str:
    counts = collections.Counter((outcome.case.points, outcome.kind) for outcome in outcomes)
    names = dict.fromkeys(name for name, _ in counts)
    return _markdown(["filling", *_KINDS], [[name, *(counts[name, kind] for kind in _KINDS)] for name in names])


def _undetermined() -> str:
    rows = [[f"`{_cell(ops)}`", "all" if points is None else ", ".join(points), why] for ops, points, why in UNDETERMINED]
    return _markdown(["operators", "fillings", "why"], rows)


def _totals(outcomes: Iterable[Outcome]) -> str:
    counts = collections.Counter((outcome.case.dtype, outcome.kind) for outcome in outcomes)
    rows = [[dtype_name(dtype), *(counts[dtype, kind] for kind in _KINDS)] for dtype in DTYPES]
    total = [sum(counts[dtype, kind] for dtype in DTYPES) for kind in _KINDS]
    return _markdown(["cases", *_KINDS], [*rows, ["all", *total]])


def _faults(outcomes: Iterable[Outcome]) -> list[str]:
    faults = [outcome for outcome in outcomes if outcome.kind in ("wrong", "raised")]
    if not faults:
        return []
    rows = sorted([str(outcome.case), outcome.kind, _cell(outcome.detail)] for outcome in faults)
    return ["## Wrong or raised", _markdown(["case", "kind", "what"], rows)]


def _reasons(outcomes: Iterable[Outcome]) -> str:
    groups = collections.defaultdict(set)
    for outcome in outcomes:
        if outcome.kind == "eager":
            groups[outcome.detail].add(outcome.case.op)
    rows = [[_cell(reason), ", ".join(f"`{op}`" for op in sorted(ops))] for reason, ops in sorted(groups.items())]
    return _markdown(["reason", "operators"], rows)


def _table(outcomes: Iterable[Outcome]) -> str:
    counts = collections.Counter((outcome.case.op, outcome.case.dtype, outcome.kind) for outcome in outcomes)
    ops = sorted({op for op, _, _ in counts})
    rows = [[f"`{op}`", *(_tally(counts, op, dtype) for dtype in DTYPES)] for op in ops]
    return _markdown(["operator", *map(dtype_name, DTYPES)], rows)


def _tally(counts: collections.Counter, op: str, dtype: torch.dtype) -> str:
    """`compiled 4` or `compiled 2, eager 2`; empty where eager torch lacks the dtype."""
    return ", ".join(f"{kind} {n}" for kind in _KINDS if (n := counts[op, dtype, kind]))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:200]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
