"""Calls on `xla` tensors by depth: host time of a warm call, and the first call with all tracing and compilation.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks/xla_steps.py

Host time is the time until the call's graph is built. Between calls the graph runs to its end, outside the timed part. The
first call is timed to the end of its run. All peers run one seed decoder of the same seed, one after the other, each peer
and depth in a process of its own: in one process the lazy peer leaves so much garbage, cold caches and a fragmented heap
behind that a call of this backend takes five times as long, and layers that one depth has traced make the first call of
another one cheaper.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable

import _record
import torch
from _measure import Samples, Seconds, arguments, console, measure, median, print_machine, report, verdict, warm
from _models import DecoderConfig, SeedDecoder, counting_batches, next_token_loss
from rich.progress import track

if importlib.util.find_spec("torch_xla") is None:
    sys.exit("torch_xla is not installed: this benchmark is about xla tensors")

import torch_xla
import torchax

import pure_backend

Forward = Callable[[torch.Tensor], torch.Tensor]
Call = Callable[[], object]


def _their_pure_module(model: SeedDecoder) -> Forward:
    from torch_xla.experimental.assume_pure import PureModule

    torchax.default_env()  # PureModule makes it inside a JAX trace, where it fails
    return PureModule(model)


def _compiled(model: SeedDecoder, backend: str = "assume_pure", **options: str) -> Forward:
    return torch.compile(model, backend=backend, options=options or None)


def _their_scan_layers(model: SeedDecoder) -> Forward:
    from torch_xla.experimental.scan_layers import scan_layers

    return lambda tokens: model.head(model.norm(scan_layers(model.blocks, model.embedding(tokens))))


def _scan_layers(model: SeedDecoder) -> Forward:
    return lambda tokens: model.head(model.norm(pure_backend.scan_layers(model.blocks, model.embedding(tokens))))


PEERS: dict[str, Callable[[SeedDecoder], Forward]] = {
    "lazy": lambda model: model,
    "openxla": functools.partial(_compiled, backend="openxla"),
    "torch_xla PureModule": _their_pure_module,
    "assume_pure": _compiled,
    "assume_pure, repeats=off": functools.partial(_compiled, repeats="off"),
    "assume_pure, repeats=scan": functools.partial(_compiled, repeats="scan"),
    "PureModule": lambda model: pure_backend.PureModule(model),
    "torch_xla scan_layers": _their_scan_layers,
    "scan_layers": _scan_layers,
}


# ------------------------------------------------------------------------------------------------------------- one process


def forward_call(forward: Forward, tokens: torch.Tensor, targets: torch.Tensor) -> object:
    """The model alone."""
    with torch.no_grad():
        return forward(tokens)


def training_call(forward: Forward, tokens: torch.Tensor, targets: torch.Tensor) -> object:
    """Forward and backward."""
    loss = next_token_loss(forward(tokens), targets)
    loss.backward()
    return loss


CALLS = {"forward": forward_call, "training": training_call}


def measure_one(case: str, peer: str, layers: int, rounds: int) -> dict:
    """Seconds of the calls of one peer, and of its first call."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    torch.manual_seed(0)
    device = torch_xla.device()  # before any backward: autograd makes the queues of all devices in its first one
    model = SeedDecoder(DecoderConfig(layers=layers)).to(device)
    (batch,) = counting_batches(1, batch=2, seq=8, vocab=256)
    tokens, targets = batch[:, :-1].int().to(device), batch[:, 1:].to(device)  # torch_xla's PureModule takes no int64
    torch_xla.sync(wait=True)
    call = functools.partial(CALLS[case], PEERS[peer](model), tokens, targets)

    def finish() -> None:
        """Run the graph while the gradients are there, then drop them."""
        torch_xla.sync(wait=True)
        model.zero_grad()

    first = warm({peer: call}, finish)
    return {"first": first[peer], "samples": measure({peer: call}, rounds, finish)[peer]}


def alone(case: str, peer: str, layers: int, rounds: int) -> dict:
    """`measure_one` in a process of its own."""
    job = [sys.executable, __file__, "--one", case, peer, str(layers), "--rounds", str(rounds)]
    started = time.perf_counter()
    found = json.loads(subprocess.run(job, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    console.print(f"{case}, {layers} layers, {peer}: {time.perf_counter() - started:.0f} s", style="dim")
    return {"first": found["first"], "samples": [Seconds(*s) for s in found["samples"]]}


# --------------------------------------------------------------------------------------------------------------- all of them


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of call.

    Attributes:
        name: Which of `CALLS`.
        peers: Depths by peer. The first peer has all depths and is what the others are compared with.
    """

    name: str
    peers: dict[str, tuple[int, ...]]

    def run(self, rounds: int) -> dict[tuple[str, int], dict]:
        """Measure and print.

        Returns:
            Median host seconds `host` and seconds of the first call `first`, by peer and depth.
        """
        jobs = [(peer, layers) for peer, depths in self.peers.items() for layers in depths]
        found = {}
        for peer, layers in track(jobs, description=self.name, console=console, transient=True):
            found[peer, layers] = one = alone(self.name, peer, layers, rounds)
            _record.point(f"host-time-{self.name}", peer, layers, 1e3 * median(one["samples"]))
            if self.name == "training":
                _record.point("first-step", peer, layers, one["first"])
        for layers in sorted({layers for _, layers in jobs}):
            samples: Samples = {peer: one["samples"] for (peer, n), one in found.items() if n == layers}
            notes = {peer: f"first call {one['first']:.1f} s" for (peer, n), one in found.items() if n == layers}
            report(f"{self.name}, {layers} layers: host time", samples, next(iter(samples)), "ms", notes)
        return {key: {"first": one["first"], "host": median(one["samples"])} for key, one in found.items()}


def _distinct(*depths: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(depths))


def forward(shallow: int, deep: int, rounds: int) -> None:
    """Calls without gradient."""
    peers = ("lazy", "torch_xla PureModule", "assume_pure", "PureModule")
    found = Case("forward", dict.fromkeys(peers, _distinct(shallow, deep))).run(rounds)
    for peer, base, target in (
        ("lazy", "assume_pure", 60.0),
        ("torch_xla PureModule", "assume_pure", 10.0),
        ("torch_xla PureModule", "PureModule", 3.0),
    ):
        times = found[peer, deep]["host"] / found[base, deep]["host"]
        verdict(f"host time without gradient, {deep} layers, {peer} / {base},", times, target, "times", at_most=False)


def training(shallow: int, deep: int, deepest: int, rounds: int) -> None:
    """Forward and backward; loops are also measured deeper, for their first call does not grow."""
    depths = dict.fromkeys(PEERS, _distinct(shallow, deep))
    depths["openxla"] = (shallow,)
    depths["torch_xla scan_layers"] = depths["scan_layers"] = _distinct(shallow, deep, deepest)
    found = Case("training", depths).run(rounds)
    for peer, base, target in (
        ("lazy", "assume_pure", 10.0),
        ("torch_xla PureModule", "assume_pure", 3.0),
        ("torch_xla PureModule", "PureModule", 2.0),
        ("torch_xla scan_layers", "scan_layers", 3.0),
    ):
        times = found[peer, deep]["host"] / found[base, deep]["host"]
        verdict(f"host time of training, {deep} layers, {peer} / {base},", times, target, "times", at_most=False)
    times = found["assume_pure", shallow]["host"] / found["openxla", shallow]["host"]
    verdict(f"host time of training, {shallow} layers, assume_pure / openxla,", times, 1.0, "times")
    times = found["assume_pure", deep]["first"] / found["torch_xla PureModule", deep]["first"]
    verdict(f"first step, {deep} layers, assume_pure / torch_xla PureModule,", times, 1.5, "times")
    first = {peer: found[peer, deepest]["first"] for peer in ("scan_layers", "torch_xla scan_layers")}
    times = first["scan_layers"] / found["scan_layers", shallow]["first"]
    verdict(f"first step of scan_layers, {deepest} layers against {shallow},", times, 1.3, "times")
    times = first["torch_xla scan_layers"] / first["scan_layers"]
    verdict(f"first step, {deepest} layers, torch_xla scan_layers / scan_layers,", times, 3.0, "times", at_most=False)


def main() -> None:
    """Run both cases and print."""
    parser = arguments(__doc__, rounds=10)
    parser.add_argument("--layers", type=int, nargs=2, default=(12, 100), help="without gradient (default: %(default)s)")
    parser.add_argument("--training-layers", type=int, nargs=3, default=(12, 40, 100), help="the last is for loops only")
    parser.add_argument("--one", nargs=3, metavar=("CASE", "PEER", "LAYERS"), help="measure this alone and print it as JSON")
    args = parser.parse_args()
    if args.one:
        case, peer, layers = args.one
        print(json.dumps(measure_one(case, peer, int(layers), args.rounds)))
        return
    layers, training_layers, rounds = args.layers, args.training_layers, args.rounds
    if args.quick:
        layers, training_layers, rounds = (1, 1), (1, 1, 1), 3
    print_machine()
    forward(*layers, rounds)
    training(*training_layers, rounds)


if __name__ == "__main__":
    main()
