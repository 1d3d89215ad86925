"""Transforms on `xla` tensors beside torch_xla's own: host time of calls, and the first step.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks/transforms.py

Each peer has a process of its own. Host time is the time until the call's graph is built; between calls the graph runs to its
end.
The first step is forward and backward with all tracing and compilation, to the end of the run.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _measure import Samples, Seconds, arguments, console, measure, print_machine, print_table, ratio, report, verdict
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from seed_decoder import DecoderConfig, SeedDecoder

if importlib.util.find_spec("torch_xla") is None:
    sys.exit("torch_xla is not installed: this benchmark is about xla tensors")

import torch_xla
import torchax

Forward = Callable[[torch.Tensor], torch.Tensor]


def _theirs_pure(decoder: SeedDecoder) -> Forward:
    from torch_xla.experimental.assume_pure import PureModule

    torchax.default_env()  # PureModule makes it inside a JAX trace, where it fails
    return PureModule(decoder)


def _ours_pure(decoder: SeedDecoder) -> Forward:
    import pure_backend

    return pure_backend.PureModule(decoder)


def _theirs_scanned(decoder: SeedDecoder) -> Forward:
    from torch_xla.experimental.scan_layers import scan_layers

    return lambda tokens: decoder.head(decoder.norm(scan_layers(decoder.blocks, decoder.embedding(tokens))))


def _ours_scanned(decoder: SeedDecoder) -> Forward:
    from pure_backend import scan_layers

    return lambda tokens: decoder.head(decoder.norm(scan_layers(decoder.blocks, decoder.embedding(tokens))))


PEERS = {
    "torch_xla PureModule": _theirs_pure,
    "PureModule": _ours_pure,
    "torch_xla scan_layers": _theirs_scanned,
    "scan_layers": _ours_scanned,
}


def measure_one(peer: str, layers: int, grad: bool, rounds: int) -> dict:
    """Seconds of the calls of one peer, and of its first step."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    torch.manual_seed(0)
    device = torch_xla.device()
    decoder = SeedDecoder(DecoderConfig(layers=layers)).to(device)
    tokens = torch.randint(256, (2, 8), dtype=torch.int32).to(device)  # torch_xla's PureModule takes no int64
    torch_xla.sync(wait=True)
    forward = PEERS[peer](decoder)

    def call() -> torch.Tensor:
        with torch.set_grad_enabled(grad):
            out = forward(tokens).sum()
            if grad:
                out.backward()
        return out

    def finish() -> None:
        torch_xla.sync(wait=True)
        decoder.zero_grad()

    started = time.perf_counter()
    call()
    finish()
    first = time.perf_counter() - started
    return {"first": first, "samples": measure({peer: call}, rounds, finish)[peer]}


def compare(title: str, peers: list[str], layers: int, grad: bool, rounds: int, target: float) -> None:
    """Measure peers, each in a process of its own, and print them against the first."""
    samples: Samples = {}
    notes = {}
    for peer in track(peers, description=title, console=console, transient=True):
        found = one(peer, layers, grad, rounds)
        samples[peer] = [Seconds(*s) for s in found["samples"]]
        notes[peer] = f"first step {found['first']:.1f} s"
    report(f"{title}, {layers} layers", samples, peers[0], "ms", notes)
    verdict(f"{peers[0]} / {peers[1]}, {title}", ratio(samples, peers[0], peers[1]), target, "times", at_most=False)


def one(peer: str, layers: int, grad: bool, rounds: int) -> dict:
    """Run `measure_one` in a process of its own."""
    job = [sys.executable, __file__, "--one", peer, "--layers", str(layers), "--rounds", str(rounds)] + ["--grad"] * grad
    return json.loads(subprocess.run(job, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def first_steps(depths: tuple[int, int]) -> None:
    """The first training step by depth."""
    seconds = {(peer, n): one(peer, n, True, 1)["first"] for peer in ("torch_xla scan_layers", "scan_layers") for n in depths}
    rows = [(peer, str(n), f"{s:.1f}") for (peer, n), s in seconds.items()]
    print_table("first training step", ("peer", "layers", "s"), rows)
    shallow, deep = (seconds["scan_layers", n] for n in depths)
    verdict(f"first step with {depths[1]} layers against {depths[0]}", deep / shallow, 1.3, "times")
    theirs = seconds["torch_xla scan_layers", depths[1]]
    verdict("first step of torch_xla's scan_layers against ours", theirs / deep, 3.0, "times", at_most=False)


def main() -> None:
    """Run all and print."""
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--one", choices=PEERS, help="measure this peer alone and print it as JSON")
    parser.add_argument("--grad", action="store_true", help="with --one: forward and backward")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_one(args.one, args.layers, args.grad, args.rounds)))
        return
    deep, scanned, rounds = (4, 3, 5) if args.quick else (args.layers, 50, args.rounds)
    print_machine()
    pure, scan = ["torch_xla PureModule", "PureModule"], ["torch_xla scan_layers", "scan_layers"]
    compare("no grad", pure, deep, False, rounds, 3.0)
    compare("forward + backward", pure, min(deep, 50), True, rounds, 2.0)
    compare("scanned, forward + backward", scan, scanned, True, rounds, 3.0)
    first_steps((2, 4) if args.quick else (10, 100))


if __name__ == "__main__":
    main()
