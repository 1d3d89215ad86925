"""Programs of several processes, as `torchrun --nproc-per-node N` starts them, with gloo on CPUs and without ports.

A test file lists functions of a rank as `PROGRAMS`. `run_ranks` starts one process a rank, since the imports cost more than all
that the functions do, and in each the functions run one after the other, between barriers. The first error ends all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

_TESTS = Path(__file__).parent
_COLLECTIVE_S = 60  # how long a rank waits for another before it gives up


def run_ranks(file: str, folder: Path, ranks: int = 2, limit_s: float = 300, **environment: str) -> dict[str, str]:
    """Run the `PROGRAMS` of a file on several ranks.

    Args:
        file: The test file.
        folder: A fresh folder, for the ranks' store and what they print.
        ranks: How many processes.
        limit_s: When they are stopped, in seconds.
        environment: Variables of the processes.

    Returns:
        What failed, by rank: an empty dict if all programs passed on all ranks.
    """
    processes = [_start(file, folder, rank, ranks, environment) for rank in range(ranks)]
    try:
        _wait(processes, time.monotonic() + limit_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {
        f"rank {rank}, exit status {p.returncode}": _told(folder, rank) for rank, p in enumerate(processes) if p.returncode != 0
    }


def _start(file: str, folder: Path, rank: int, ranks: int, environment: dict[str, str]) -> subprocess.Popen:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([os.fspath(_TESTS), os.fspath(_TESTS.parent), os.environ.get("PYTHONPATH", "")])
    code = f"import ranks; ranks.main({file!r}, {os.fspath(folder)!r})"
    with open(folder / f"{rank}.txt", "w") as out:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            env=os.environ | {"PYTHONPATH": path, "PURE_BACKEND_CACHE_DIR": ""} | place | environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen], limit: float) -> None:
    """Until all have ended, or one has failed and the others had a moment to say why."""
    while any(process.poll() is None for process in processes) and time.monotonic() < limit:
        if any(process.poll() for process in processes):
            limit = min(limit, time.monotonic() + 5)
        time.sleep(0.05)


def _told(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.txt").read_text()[-6000:]


def main(file: str, folder: str) -> None:
    """What a rank does."""
    import torch
    import torch.distributed as dist

    from pure_backend.ir.failures import faults_raised

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=_COLLECTIVE_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
    module = _load(file)
    for program in module.PROGRAMS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with faults_raised(), _named(program.__name__):
            start = time.monotonic()
            program()
            print(json.dumps({"program": program.__name__, "seconds": round(time.monotonic() - start, 2)}), flush=True)
            if ranks > 1:  # torch_xla's `mark_sharding` imports torchax, after which torch has no barrier
                dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def _named(program: str):
    """End this rank at once where a program fails: what waits for the others may wait long."""
    try:
        yield
    except BaseException:
        print(f"FAILED: {program}\n{traceback.format_exc()}", flush=True)
        os._exit(1)


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("programs_of_a_rank", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
