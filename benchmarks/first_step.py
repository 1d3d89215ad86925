"""The first training step on plain CPU tensors, by depth and by the option `repeats`, and a warm start from the disk cache.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks/first_step.py

Each first step is forward and backward of a seed decoder in a process of its own. Wall time has Dynamo's capture and the step
itself in it; the backend's time is what `pure_backend.statistics().seconds` counts. `trace + lower` is its stages trace,
differentiate and lower. A warm start is the same step in a second process with the same cache folder, on plain and, where
torch_xla is installed, on `xla` tensors. First steps on `xla` tensors beside torch_xla's are in `xla_steps.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time

import _record
import torch
from _measure import arguments, console, print_machine, print_table, verdict
from _models import DecoderLoss
from rich.progress import track

import pure_backend

REPEATS = ("off", "auto", "scan")
HAS_XLA = importlib.util.find_spec("torch_xla") is not None


def measure_one(peer: str, layers: int, device_type: str) -> dict:
    """Seconds and counters of the first step.

    Args:
        peer: A choice for `repeats`, or "inductor".
        layers: Depth.
        device_type: "cpu" or "xla".
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    device, finish = _device(device_type)
    model = DecoderLoss(layers).to(device)
    tokens = torch.zeros(2, 9, dtype=torch.long, device=device)
    finish()
    options = {} if peer == "inductor" else {"backend": "assume_pure", "options": {"repeats": peer}}
    started = time.perf_counter()
    torch.compile(model, **options)(tokens).backward()
    finish()
    wall = time.perf_counter() - started
    found = pure_backend.statistics()
    return {"wall": wall, "seconds": dict(found.seconds), "traces": found.traces, "lowerings": found.lowerings}


def _device(device_type: str):
    if device_type == "cpu":
        return torch.device("cpu"), lambda: None
    import torch_xla

    return torch_xla.device(), lambda: torch_xla.sync(wait=True)


def alone(peer: str, layers: int, device_type: str = "cpu", cache: str = "") -> dict:
    """`measure_one` in a process of its own, with a cache folder or none."""
    job = [sys.executable, __file__, "--one", peer, str(layers), device_type, "--cache", cache]
    uncached = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"} if peer == "inductor" else {}
    output = subprocess.run(job, check=True, stdout=subprocess.PIPE, env=os.environ | uncached).stdout
    return json.loads(output.splitlines()[-1])


def backend_seconds(found: dict) -> float:
    """All of the backend's time."""
    return sum(found["seconds"].values())


def trace_and_lower(found: dict) -> float:
    """Its part that is neither passes over the graph nor XLA."""
    return sum(found["seconds"][stage] for stage in ("trace", "differentiate", "lower"))


def program_seconds(found: dict) -> float:
    """Its part from the graph to the executable: all but passes over the graph."""
    return trace_and_lower(found) + found["seconds"]["compile"]


def by_depth(depths: list[int]) -> None:
    """First steps of all choices at all depths, and of inductor at the least."""
    jobs = [(repeats, layers) for layers in depths for repeats in REPEATS] + [("inductor", depths[0])]
    found, rows = {}, []
    for peer, layers in track(jobs, description="first steps", console=console, transient=True):
        found[peer, layers] = one = alone(peer, layers)
        if peer == "inductor":
            rows.append((peer, str(layers), f"{one['wall']:.1f}", *4 * ("",)))
            continue
        parts = (trace_and_lower(one), one["seconds"]["compile"], backend_seconds(one))
        others = one["wall"] - backend_seconds(one)
        rows.append((f"repeats={peer}", str(layers), f"{one['wall']:.1f}", f"{others:.1f}", *(f"{s:.2f}" for s in parts)))
        _record.point("backend-time", f"repeats={peer}", layers, parts[2])
        _record.point("backend-time", f"repeats={peer}, trace + lower", layers, parts[0])
    headings = ("peer", "layers", "wall s", "Dynamo and the step s", "trace + lower s", "XLA s", "all of the backend s")
    print_table("first training step, plain tensors", headings, rows)
    shallow, deep = depths[0], depths[-1]
    for what, seconds in (("trace + lower + XLA", program_seconds), ("all of the backend", backend_seconds)):
        ratio = seconds(found["scan", deep]) / seconds(found["scan", shallow])
        verdict(f"{what} with repeats=scan, {deep} layers against {shallow},", ratio, 1.3, "times")
    ratio = trace_and_lower(found["auto", deep]) / trace_and_lower(found["auto", shallow])
    verdict(f"trace + lower with repeats=auto, {deep} layers against {shallow},", ratio, 1.5, "times")


def warm_start(layers: int) -> None:
    """The same step in two processes with one cache folder."""
    rows = []
    for device_type in ("cpu", "xla") if HAS_XLA else ("cpu",):
        with tempfile.TemporaryDirectory() as cache:
            first, second = (alone("auto", layers, device_type, cache) for _ in range(2))
        for name, one in (("first", first), ("second", second)):
            work = (f"{backend_seconds(one):.2f}", str(one["traces"]), str(one["lowerings"]), f"{one['wall']:.1f}")
            rows.append((device_type, name, *work))
        ratio = backend_seconds(second) / backend_seconds(first)
        verdict(f"backend time of a warm start, {layers} layers, {device_type},", ratio, 0.1, "of a cold one")
    print_table("warm start", ("tensors", "process", "backend s", "traces", "lowerings", "wall s"), rows)


def main() -> None:
    """Run all and print."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 50, 100], help="(default: %(default)s)")
    parser.add_argument("--one", nargs=3, metavar=("PEER", "LAYERS", "DEVICE"), help="measure this alone and print it as JSON")
    parser.add_argument("--cache", default="", help="with --one: folder of the disk cache (default: none)")
    args = parser.parse_args()
    if args.one:
        os.environ["PURE_BACKEND_CACHE_DIR"] = args.cache
        peer, layers, device_type = args.one
        print(json.dumps(measure_one(peer, int(layers), device_type)))
        return
    print_machine()
    by_depth([1] if args.quick else args.layers)
    warm_start(1 if args.quick else 10)


if __name__ == "__main__":
    main()
