"""A small GPT trained on a short story, letter by letter, three ways: eager, compiled, and as one program a step.

python examples/train_gpt.py [--steps 150] [--hf] [--sample 200]

`--hf` trains a GPT2LMHeadModel of transformers (fresh weights, nothing is downloaded) in the place of the GPT below.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from pure_backend import TrainStep

TEXT = Path(__file__).parent / "harbour.txt"
console = Console()
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Causal attention and a feed-forward layer, both added to what they read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`f32[batch, seq, width]` -> the same."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A decoder whose output layer is its embedding."""

    def __init__(self, vocab: int, seq: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`i64[batch, seq]` -> `f32[batch, seq, vocab]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


class HuggingFace(nn.Module):
    """GPT-2 of transformers with the same interface."""

    def __init__(self, vocab: int, seq: int, width: int, layers: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.gpt2 = GPT2LMHeadModel(
            GPT2Config(vocab_size=vocab, n_positions=seq, n_embd=width, n_layer=layers, n_head=4, use_cache=False, **off)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`i64[batch, seq]` -> `f32[batch, seq, vocab]`."""
        return self.gpt2(tokens).logits


def next_letter_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of every position."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loop_body(model: nn.Module, forward: Callable, optimizer: torch.optim.Optimizer) -> Step:
    """What a training loop repeats."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = next_letter_loss(forward(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Step]] = {
    "eager": lambda model, optimizer: loop_body(model, model, optimizer),
    "torch.compile + eager optimizer": lambda model, optimizer: loop_body(
        model, torch.compile(model, backend="assume_pure"), optimizer
    ),
    "TrainStep": lambda model, optimizer: TrainStep(model, optimizer, next_letter_loss, clip_grad_norm=1.0),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One way of training.

    Attributes:
        losses: The loss of each step.
        seconds: How long each step took.
    """

    losses: list[float]
    seconds: list[float]


def train(name: str, model: nn.Module, batches: list[torch.Tensor]) -> Run:
    """Train one way, with a learning rate that rises and falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=len(batches) + 1)
    step, run = WAYS[name](model, optimizer), Run([], [])
    with Progress(console=console, transient=True) as progress:
        for batch in progress.track(batches, description=name):
            started = time.perf_counter()
            loss = step(batch[:, :-1], batch[:, 1:])
            run.losses.append(loss.item())
            run.seconds.append(time.perf_counter() - started)
            schedule.step()
    return run


def plot(losses: list[float], columns: int = 60, rows: int = 8) -> str:
    """A curve of letters: the mean loss of each column."""
    size = max(1, len(losses) // columns)
    means = [statistics.fmean(losses[i : i + size]) for i in range(0, len(losses), size)]
    low, high = min(means), max(means)
    heights = [round((mean - low) / (high - low or 1) * (rows - 1)) for mean in means]
    lines = ["".join("•" if height == row else " " for height in heights) for row in reversed(range(rows))]
    labels = [f"{high:6.2f} ", *[" " * 7] * (rows - 2), f"{low:6.2f} "]
    return "\n".join(label + line for label, line in zip(labels, lines, strict=True))


def sample(model: nn.Module, letters: str, seq: int, count: int) -> str:
    """What the model writes after "The ", most probable letters first."""
    text = [letters.index(letter) for letter in "The "]
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text[-seq:]]))[0, -1].argmax()))
    return "".join(letters[i] for i in text)


def main(argv: list[str] | None = None) -> dict[str, Run]:
    """Train three ways, print a plot and a table.

    Returns:
        What happened in each way.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"steps": 150, "batch": 16, "seq": 64, "width": 128, "layers": 4, "sample": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hf", action="store_true", help="train a GPT2LMHeadModel of transformers")
    args = parser.parse_args(argv)
    text = TEXT.read_text()
    letters = "".join(sorted(set(text)))
    story = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    seed = (HuggingFace if args.hf else GPT)(len(letters), args.seq, args.width, args.layers)
    starts = torch.randint(len(story) - args.seq, (args.steps, args.batch))
    batches = [torch.stack([story[i : i + args.seq + 1] for i in row]) for row in starts]
    table = Table("way", "first step s", "ms a step", "first loss", "last loss")
    runs, model = {}, seed
    for name in WAYS:
        model = copy.deepcopy(seed)
        runs[name] = run = train(name, model, batches)
        middle = 1e3 * statistics.median(run.seconds[2:])
        table.add_row(name, f"{run.seconds[0]:.1f}", f"{middle:.1f}", f"{run.losses[0]:.3f}", f"{run.losses[-1]:.3f}")
    console.print(f"\nloss of TrainStep over {args.steps} steps\n{plot(runs['TrainStep'].losses)}\n")
    console.print(table)
    if args.sample:
        console.print(sample(model, letters, args.seq, args.sample), markup=False, highlight=False)
    return runs


if __name__ == "__main__":
    main()
