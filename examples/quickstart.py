"""Train one small decoder with and without the backend, on `xla` tensors and on plain CPU tensors, and compare.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python examples/quickstart.py

Where torch_xla is not installed, only the runs on plain tensors are made.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from seed_decoder import DecoderConfig, SeedDecoder, counting_batches, next_token_loss

import pure_backend

HAS_XLA = importlib.util.find_spec("torch_xla") is not None


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run showed.

    Attributes:
        name: What ran.
        host_ms: Milliseconds of each step. On `xla` tensors: until the step's graph is built, before it is synced.
        first_step_s: Seconds of the first step to its end, compilation included.
        traces: How many times the backend traced a graph.
        lowerings: How many programs the backend lowered to HLO.
        losses: The loss of each step.
        parameters: The parameters after the last step, on the CPU.
    """

    name: str
    host_ms: tuple[float, ...]
    first_step_s: float
    traces: int
    lowerings: int
    losses: tuple[float, ...]
    parameters: tuple[torch.Tensor, ...]

    @property
    def warm_ms(self) -> float:
        """The median step, without the first two."""
        return statistics.median(self.host_ms[2:])

    def difference(self, other: Run) -> float:
        """The largest absolute difference of a parameter to another run's."""
        pairs = zip(self.parameters, other.parameters, strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)


def train(
    name: str,
    device: torch.device,
    compiled: bool,
    config: DecoderConfig,
    batches: Sequence[torch.Tensor],
    advance: Callable[[], None] = lambda: None,
) -> Run:
    """Train a fresh seed decoder for one step a batch; the same seed gives every run the same start."""
    torch._dynamo.reset()
    pure_backend.clear_caches()
    pure_backend.reset_statistics()
    torch.manual_seed(0)
    model = SeedDecoder(config).to(device)
    forward = torch.compile(model, backend="assume_pure") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(batch[:, :-1].to(device), batch[:, 1:].to(device)) for batch in batches]
    finish = _finisher(device)
    finish()

    host_ms, losses, first_step_s = [], [], 0.0
    for tokens, targets in data:
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = next_token_loss(forward(tokens), targets)
        loss.backward()
        optimizer.step()
        host_ms.append(1e3 * (time.perf_counter() - started))
        finish()
        first_step_s = first_step_s or time.perf_counter() - started
        losses.append(loss.item())
        advance()

    counts = pure_backend.statistics()
    parameters = tuple(p.detach().cpu() for p in model.parameters())
    return Run(name, tuple(host_ms), first_step_s, counts.traces, counts.lowerings, tuple(losses), parameters)


def _finisher(device: torch.device) -> Callable[[], None]:
    """What ends a step on a device: on `xla` tensors, run the graph that the step built."""
    if device.type != "xla":
        return lambda: None
    import torch_xla

    return lambda: torch_xla.sync(wait=True)


def compare(config: DecoderConfig, batches: Sequence[torch.Tensor], xla: bool, console: Console) -> list[Run]:
    """All runs, the eager one on plain tensors first."""
    cpu = torch.device("cpu")
    plans = [("cpu eager", cpu, False), ("cpu assume_pure", cpu, True)]
    if xla:
        import torch_xla

        device = torch_xla.device()  # before any backward: autograd makes the queues of all devices in its first one
        plans += [("xla lazy", device, False), ("xla assume_pure", device, True)]
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = [progress.add_task(name, total=len(batches), start=False) for name, _, _ in plans]
        runs = []
        for task, (name, device, compiled) in zip(tasks, plans, strict=True):
            progress.start_task(task)
            runs.append(train(name, device, compiled, config, batches, lambda task=task: progress.advance(task)))
    return runs


def table(runs: Sequence[Run], config: DecoderConfig) -> Table:
    """The runs side by side."""
    eager = runs[0]
    result = Table(
        title=f"Seed decoder, {config.layers} layers, {len(eager.losses)} training steps",
        caption="host ms: median of the warm steps; on xla, until the step's graph is built\n"
        "max diff: the largest difference of a parameter to the eager run's",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    result.add_column("run", no_wrap=True)
    for title in ("host\nms", "first\nstep s", "traces", "lower-\nings", "first\nloss", "last\nloss", "max\ndiff"):
        result.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        result.add_row(
            run.name,
            f"{run.warm_ms:.2f}",
            f"{run.first_step_s:.1f}",
            str(run.traces),
            str(run.lowerings),
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            f"{run.difference(eager):.1e}",
        )
    return result


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plain", action="store_true", help="leave out the runs on xla tensors")
    args = parser.parse_args(argv)
    if args.steps < 3:
        parser.error("--steps must be at least 3: the first two are not counted as warm")
    config = DecoderConfig(layers=args.layers, hidden=args.hidden, intermediate=args.intermediate)
    batches = counting_batches(args.steps, args.batch, args.seq, config.vocab)

    console = Console()
    if not HAS_XLA:
        console.print("torch_xla is not installed: only plain CPU tensors are compared.")
    runs = compare(config, batches, HAS_XLA and not args.plain, console)
    console.print(table(runs, config))
    return runs


if __name__ == "__main__":
    main()
