"""Units of work, an operator and a dtype each, in processes of their own, with a progress bar."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm

from .cases import Case, cases, entries
from .outcome import Outcome, forget, run

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


def _run_unit(name: str, dtype: torch.dtype, limit: int) -> list[Outcome]:
    try:
        return [run(case, sample) for case, sample in cases(entries()[name], dtype, limit)]
    except Exception as error:  # an entry that torch cannot sample, or this harness not run, must not end the run of all others
        return [Outcome(Case(name, dtype), "raised", f"harness: {type(error).__name__}: {error}")]
    finally:
        forget()
