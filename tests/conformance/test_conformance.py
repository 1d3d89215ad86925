"""A seeded part of the database: every operator once in f32 with its gradient, and a sample of other dtypes and layouts."""

import dataclasses
import random

import pytest
import torch

from .cases import DTYPES, LAYOUTS, Case, NoSample, entries, kills_eager, point_samples, supports
from .outcome import run, run_at_points
from .points import FILLINGS

SAMPLE_SEED = 4
SAMPLE_SIZE = 120
POINTS_SAMPLE_SIZE = 60


def _first() -> list[Case]:
    return [Case(name, torch.float32) for name, entry in entries().items() if supports(entry, torch.float32)]


def _others() -> list[Case]:
    chosen = random.Random(SAMPLE_SEED)
    cases = []
    while len(cases) < SAMPLE_SIZE:
        name = chosen.choice(sorted(entries()))
        case = Case(name, chosen.choice(DTYPES), chosen.choice(LAYOUTS), number=chosen.randrange(3))
        case = chosen.choice([case, case, dataclasses.replace(case, dynamo=True), dataclasses.replace(case, inplace=True)])
        entry = entries()[name]
        in_place = entry.inplace_variant is not None and not kills_eager(entry, case.dtype)
        if supports(entry, case.dtype) and (in_place or not case.inplace):
            cases.append(case)
    return cases


@pytest.mark.parametrize("case", list(dict.fromkeys([*_first(), *_others()])), ids=str)
def test_an_operator_equals_eager_or_is_left_to_eager(case: Case) -> None:
    try:
        outcome = run(case)
    except NoSample:
        pytest.skip("torch has no such sample")
    if outcome.kind == "skipped":
        pytest.skip(outcome.detail)
    assert outcome.kind in ("compiled", "eager"), outcome.detail


def _at_points() -> list[tuple[str, str]]:
    chosen = random.Random(SAMPLE_SEED)
    names = sorted(name for name, entry in entries().items() if supports(entry, torch.float32))
    return [(chosen.choice(names), chosen.choice(sorted(FILLINGS))) for _ in range(POINTS_SAMPLE_SIZE)]


@pytest.mark.parametrize(("name", "filling"), list(dict.fromkeys(_at_points())))
def test_an_operator_equals_eager_at_special_points(name: str, filling: str) -> None:
    number, sample = next(point_samples(entries()[name], torch.float32), (0, None))
    case = Case(name, torch.float32, number=number)
    outcomes = [] if sample is None else list(run_at_points(case, sample, [filling]))
    if not outcomes:
        pytest.skip("eager raises, or does not determine the result, or there is no floating-point tensor to fill")
    assert [o.kind for o in outcomes if o.kind in ("wrong", "raised")] == [], outcomes[0].detail
