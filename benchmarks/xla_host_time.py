"""Host time per call on `xla` tensors: lazy tracing, torch_xla's own `PureModule`, and this backend.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks/xla_host_time.py

Host time is the time until the call's graph is built. Between calls the graph runs to its end, outside the timed part. Each
peer is called twice before it is timed: a lazy call leaves so much garbage behind that the next peer would start with cold
caches. Where the CPU is the device, the weights pass through its caches too; `--hidden 16 --intermediate 32` shows the same
graphs without that, as an accelerator would. All peers share one seed decoder.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _measure import arguments, console, measure, print_machine, ratio, report, verdict, warm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from seed_decoder import DecoderConfig, SeedDecoder, counting_batches, next_token_loss

if importlib.util.find_spec("torch_xla") is None:
    sys.exit("torch_xla is not installed: this benchmark is about xla tensors")

import torch_xla
import torchax

Peers = dict[str, Callable[[], object]]


def forwards(model: SeedDecoder) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The same model under every peer."""
    from torch_xla.experimental.assume_pure import PureModule

    return {
        "lazy": model,
        "torch_xla PureModule": PureModule(model),
        "assume_pure": torch.compile(model, backend="assume_pure"),
    }


def without_gradient(config: DecoderConfig) -> tuple[Peers, Callable[[], None]]:
    """Calls of the model, and what finishes one."""
    model, tokens, _ = _on_device(config)

    def call(forward):
        with torch.no_grad():
            return forward(tokens)

    return _each(model, call), _finish


def training(config: DecoderConfig) -> tuple[Peers, Callable[[], None]]:
    """Forward and backward, and what finishes a step: it runs the graph while the gradients are there, then drops them."""
    model, tokens, targets = _on_device(config)

    def step(forward):
        loss = next_token_loss(forward(tokens), targets)
        loss.backward()
        return loss

    def finish():
        _finish()
        model.zero_grad()

    return _each(model, step), finish


def _each(model: SeedDecoder, call: Callable) -> Peers:
    return {name: (lambda f=f: call(f)) for name, f in forwards(model).items()}


def _on_device(config: DecoderConfig) -> tuple[SeedDecoder, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    device = torch_xla.device()
    model = SeedDecoder(config).to(device)
    (batch,) = counting_batches(1, batch=2, seq=8, vocab=config.vocab)
    tokens, targets = batch[:, :-1].int().to(device), batch[:, 1:].to(device)  # PureModule takes no int64
    _finish()
    return model, tokens, targets


def _finish() -> None:
    torch_xla.sync(wait=True)


def compare(title: str, make: Callable, config: DecoderConfig, rounds: int, target: float | None = None) -> None:
    """Measure and print one case."""
    torch._dynamo.reset()
    peers, finish = make(config)
    first = warm(peers, finish)
    samples = measure(peers, rounds, finish, lead_in=2)
    notes = {name: f"first call with compilation {seconds:.1f} s" for name, seconds in first.items()}
    report(f"{title}, {config.layers} layers", samples, "lazy", "ms", notes)
    for clock, name in (("wall", "elapsed"), ("cpu", "CPU time")):
        times = ratio(samples, "lazy", "assume_pure", clock)
        what = f"lazy / assume_pure, {title}, {name}"
        if target is None:
            console.print(f"\n{what}: {times:.3g} times")
        else:
            verdict(what, times, target, "times", at_most=False)


def main() -> None:
    """Run both cases and print."""
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--layers", type=int, default=100, help="layers without gradient (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size (default: %(default)s)")
    parser.add_argument("--intermediate", type=int, default=1024, help="size inside the MLP (default: %(default)s)")
    parser.add_argument("--training-layers", type=int, default=40, help="layers of training (default: %(default)s)")
    args = parser.parse_args()
    layers, training_layers, rounds = args.layers, args.training_layers, args.rounds
    if args.quick:
        layers, training_layers, rounds = 4, 2, 5
    print_machine()
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    torch_xla.device()  # before any backward: autograd makes the queues of all devices in its first one
    torchax.default_env()  # PureModule makes it inside a JAX trace, where it fails
    config = DecoderConfig(layers=layers, hidden=args.hidden, intermediate=args.intermediate)
    compare("no grad", without_gradient, config, rounds, 40.0)
    compare("forward + backward", training, dataclasses.replace(config, layers=training_layers), rounds)


if __name__ == "__main__":
    main()
