"""Memory over many steps and many shapes on plain CPU tensors: caches stay bounded, resident memory stays flat.

    JAX_PLATFORMS=cpu python benchmarks/memory.py

Three parts, each in a fresh state: training steps with a new batch each; many batch sizes with `dynamic=True` and few
specializations kept; and the death of a model. "programs" counts traced programs that something uses, "views" the JAX views of
tensors that are kept.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import psutil
import torch
from _measure import arguments, console, print_machine, print_table, verdict
from _models import DecoderConfig, SeedDecoder, counting_batches, next_token_loss
from rich.progress import track
from torch import nn

import pure_backend
from pure_backend.jax_bridge import compile as compiler
from pure_backend.jax_bridge.runtimes import runtime_for


@dataclasses.dataclass(frozen=True)
class Moment:
    """What the process holds at one moment."""

    when: str
    programs: int
    views: int
    rss_mib: float

    @classmethod
    def now(cls, when: str) -> Moment:
        """The present, after a garbage collection."""
        gc.collect()
        rss = psutil.Process().memory_info().rss / 2**20
        return cls(when, len(compiler.programs), len(runtime_for("cpu").views), rss)


def fresh() -> None:
    """Forget what the part before left."""
    torch._dynamo.reset()
    pure_backend.clear_caches()
    gc.collect()


def training(steps: int, config: DecoderConfig) -> list[Moment]:
    """Train a seed decoder, a new batch each step."""
    torch.manual_seed(0)
    model = SeedDecoder(config)
    compiled = torch.compile(model, backend="assume_pure")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = counting_batches(steps, 2, 8, config.vocab)

    def step(i: int) -> None:
        optimizer.zero_grad()
        next_token_loss(compiled(batches[i][:, :-1]), batches[i][:, 1:]).backward()
        optimizer.step()

    return _watch(step, steps, "step", warm_up=min(100, steps // 3))


def shapes(count: int, kept: int) -> list[Moment]:
    """Forward and backward of an MLP at many batch sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    compiled = torch.compile(model, backend="assume_pure", dynamic=True, options={"max_specializations": kept})

    def call(i: int) -> None:
        compiled(torch.randn(i + 2, 32)).sum().backward()

    return _watch(call, count, "shape", warm_up=kept + kept // 2)  # by then the first programs were dropped


def death(config: DecoderConfig) -> list[Moment]:
    """A model lives and dies; so do its programs, once Dynamo forgets its graph."""
    torch.manual_seed(0)
    moments = [Moment.now("before")]
    model = SeedDecoder(config)
    compiled = torch.compile(model, backend="assume_pure")
    compiled(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    moments.append(Moment.now("after a training step"))
    del model, compiled
    torch._dynamo.reset()
    moments.append(Moment.now("model deleted, Dynamo reset"))
    return moments


def _watch(step: Callable[[int], None], count: int, what: str, warm_up: int) -> list[Moment]:
    marks = sorted({warm_up, (warm_up + count) // 2, count})
    moments = []
    for i in track(range(count), description=f"{what}s", console=console, transient=True):
        step(i)
        if i + 1 in marks:
            moments.append(Moment.now(f"{what} {i + 1}"))
    return moments


def show(title: str, moments: list[Moment]) -> None:
    """Print a part."""
    rows = [(m.when, str(m.programs), str(m.views), f"{m.rss_mib:.1f}") for m in moments]
    print_table(title, ("moment", "programs", "views", "RSS MiB"), rows)


def main() -> None:
    """Run the three parts and print."""
    parser = arguments(__doc__, rounds=500)
    parser.add_argument("--shapes", type=int, default=100, help="how many batch sizes (default: %(default)s)")
    args = parser.parse_args()
    steps, count, kept = (60, 20, 4) if args.quick else (args.rounds, args.shapes, 16)
    config = DecoderConfig(layers=1 if args.quick else 4)
    print_machine()

    moments = training(steps, config)
    show(f"{steps} training steps of a {config.layers}-layer seed decoder", moments)
    verdict("growth from warm-up to end", moments[-1].rss_mib - moments[0].rss_mib, 20.0, "MiB")
    fresh()
    moments = shapes(count, kept)
    show(f"{count} batch sizes, {kept} specializations kept", moments)
    verdict("programs kept at the end", moments[-1].programs, kept, "programs")
    verdict("growth from warm-up to end", moments[-1].rss_mib - moments[0].rss_mib, 20.0, "MiB")
    fresh()
    moments = death(config)
    show("a model's life", moments)
    verdict("programs left of a deleted model", moments[-1].programs - moments[0].programs, 0, "programs")
    # One view outlives every model: that of the constant key which programs without random operators get.
    verdict("views left of a deleted model", moments[-1].views - moments[0].views, 1, "views")


if __name__ == "__main__":
    main()
