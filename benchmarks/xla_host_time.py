"""Host time per call on `xla` tensors: lazy tracing, torch_xla's own `PureModule`, and this backend.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks/xla_host_time.py

Host time is the time until the call's graph is built. Between calls the graph runs to its end, outside the timed part. Every
peer has a process of its own, one after the other: in one process the lazy peer leaves so much garbage, cold caches and a
fragmented heap behind that a call of this backend takes five times as long. All peers run one seed decoder of the same seed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _measure import Samples, Seconds, arguments, console, measure, print_machine, ratio, report, verdict, warm
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from seed_decoder import DecoderConfig, SeedDecoder, counting_batches, next_token_loss

if importlib.util.find_spec("torch_xla") is None:
    sys.exit("torch_xla is not installed: this benchmark is about xla tensors")

import torch_xla
import torchax

Call = Callable[[], object]


def _pure_module(model: SeedDecoder) -> Callable:
    from torch_xla.experimental.assume_pure import PureModule

    torchax.default_env()  # PureModule makes it inside a JAX trace, where it fails
    return PureModule(model)


PEERS: dict[str, Callable[[SeedDecoder], Callable]] = {
    "lazy": lambda model: model,
    "torch_xla PureModule": _pure_module,
    "assume_pure": lambda model: torch.compile(model, backend="assume_pure"),
}


def without_gradient(peer: str, config: DecoderConfig) -> tuple[Call, Call]:
    """A call of the model, and what finishes it."""
    model, tokens, _ = _on_device(config)
    forward = PEERS[peer](model)

    def call():
        with torch.no_grad():
            return forward(tokens)

    return call, _finish


def training(peer: str, config: DecoderConfig) -> tuple[Call, Call]:
    """Forward and backward, and what finishes a step: it runs the graph while the gradients are there, then drops them."""
    model, tokens, targets = _on_device(config)
    forward = PEERS[peer](model)

    def step():
        loss = next_token_loss(forward(tokens), targets)
        loss.backward()
        return loss

    def finish():
        _finish()
        model.zero_grad()

    return step, finish


CASES = {"no grad": without_gradient, "forward + backward": training}


def _on_device(config: DecoderConfig) -> tuple[SeedDecoder, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    device = torch_xla.device()  # before any backward: autograd makes the queues of all devices in its first one
    model = SeedDecoder(config).to(device)
    (batch,) = counting_batches(1, batch=2, seq=8, vocab=config.vocab)
    tokens, targets = batch[:, :-1].int().to(device), batch[:, 1:].to(device)  # PureModule takes no int64
    _finish()
    return model, tokens, targets


def _finish() -> None:
    torch_xla.sync(wait=True)


def measure_one(case: str, peer: str, layers: int, rounds: int) -> dict:
    """Seconds of the calls of one peer, and of its first call."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    call, finish = CASES[case](peer, DecoderConfig(layers=layers))
    first = warm({peer: call}, finish)
    return {"first": first[peer], "samples": measure({peer: call}, rounds, finish)[peer]}


def compare(case: str, layers: int, rounds: int, target: float | None = None) -> None:
    """Measure every peer in a process of its own, and print the case."""
    samples: Samples = {}
    notes = {}
    with Progress(console=console, transient=True) as progress:
        for peer in progress.track(PEERS, description=case):
            job = [sys.executable, __file__, "--one", case, peer, "--layers", str(layers), "--rounds", str(rounds)]
            found = json.loads(subprocess.run(job, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
            samples[peer] = [Seconds(*s) for s in found["samples"]]
            notes[peer] = f"first call with compilation {found['first']:.1f} s"
    report(f"{case}, {layers} layers", samples, "lazy", "ms", notes)
    times = ratio(samples, "lazy", "assume_pure")
    if target is None:
        console.print(f"\nlazy / assume_pure, {case}: {times:.3g} times")
    else:
        verdict(f"lazy / assume_pure, {case}", times, target, "times", at_most=False)


def main() -> None:
    """Run both cases and print."""
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--layers", type=int, default=100, help="layers without gradient (default: %(default)s)")
    parser.add_argument("--training-layers", type=int, default=40, help="layers of training (default: %(default)s)")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "PEER"), help="measure this alone and print it as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_one(*args.one, args.layers, args.rounds)))
        return
    layers, training_layers, rounds = args.layers, args.training_layers, args.rounds
    if args.quick:
        layers, training_layers, rounds = 4, 2, 5
    print_machine()
    compare("no grad", layers, rounds, 40.0)
    compare("forward + backward", training_layers, rounds)


if __name__ == "__main__":
    main()
