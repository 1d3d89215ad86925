"""Units of work, an operator and a dtype each, in processes of their own, with a progress bar."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
from collections.abc import Iterator, Sequence

import torch
from torch.testing._internal.opinfo.core import OpInfo
from tqdm import tqdm

from .cases import Case, cases, entries, point_samples
from .outcome import Outcome, forget, run, run_at_points
from .points import fillings

Unit = tuple[str, torch.dtype, int]  # operator, dtype, how many samples


def run_units(units: Sequence[Unit], processes: int) -> Iterator[Outcome]:
    """The outcomes of all cases of all units, as they come."""
    bar = tqdm(total=len(units), unit="op", smoothing=0.05)
    bad = 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, _start) as pool:
        try:
            for future in concurrent.futures.as_completed([pool.submit(_run_unit, *unit) for unit in units]):
                outcomes = future.result()
                bad += sum(outcome.kind in ("wrong", "raised") for outcome in outcomes)
                bar.update()
                bar.set_postfix(wrong_or_raised=bad)
                yield from outcomes
        finally:
            pool.shutdown(cancel_futures=True)


def _start() -> None:
    """One thread a process: the processes are the parallelism."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("torch_xla") is not None:  # before any backward: autograd makes the queues of all devices
        import torch_xla

        torch_xla.device()


def at_special_points(entry: OpInfo, limit: int) -> list[Outcome]:
    """An operator's samples filled with each kind of special points."""
    found = point_samples(entry, torch.float32, limit + 1)
    cases = ((Case(entry.formatted_name, torch.float32, number=number), sample) for number, sample in found)
    return [outcome for case, sample in cases for outcome in run_at_points(case, sample, fillings(entry))]


def _run_unit(name: str, dtype: torch.dtype, limit: int) -> list[Outcome]:
    try:
        entry = entries()[name]
        outcomes = [run(case, sample) for case, sample in cases(entry, dtype, limit)]
        return outcomes + (at_special_points(entry, limit) if dtype is torch.float32 else [])
    except Exception as error:  # an entry that torch cannot sample, or this harness not run, must not end the run of all others
        return [Outcome(Case(name, dtype), "raised", f"harness: {type(error).__name__}: {error}")]
    finally:
        forget()
