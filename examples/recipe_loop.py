"""A plain training loop: bf16 autocast, gradient accumulation, clipping, an average of the weights, checkpoint and resume.

python examples/recipe_loop.py

Nothing in it knows of the backend but one line. bf16 needs no `GradScaler`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pure_backend


class Run:
    """A model with all that a checkpoint holds."""

    def __init__(self, compiled: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
        self.forward = torch.compile(self.model, backend="assume_pure") if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(self, number: int) -> float:
        """One optimizer step of two micro-batches."""
        total = 0.0
        for micro in range(2):
            generator = torch.Generator().manual_seed(2 * number + micro)
            x = torch.randn(16, 32, generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(self.forward(x), x[:, :8].argmax(1)) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)
        return total

    def save(self, path: Path) -> None:
        """Write a checkpoint; the model's own names are in it, since `self.model` is not wrapped."""
        parts = {"model": self.model, "optimizer": self.optimizer, "average": self.average}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    def load(self, path: Path) -> None:
        """Read a checkpoint."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])


def train(compiled: bool) -> list[float]:
    """The losses of six steps, the last three from a checkpoint in a new run."""
    run = Run(compiled)
    losses = [run.step(i) for i in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        run.save(path)
        run = Run(compiled)
        run.load(path)
    return losses + [run.step(i) for i in range(3, 6)]


def main() -> tuple[list[float], list[float], pure_backend.Statistics]:
    """Train both ways and print the losses."""
    eager = train(compiled=False)
    pure_backend.reset_statistics()
    losses = train(compiled=True)
    counts = pure_backend.statistics()
    print("eager:   ", eager)
    print("compiled:", losses)
    print(f"{counts.traces} trace, {counts.lowerings} lowerings, for both runs: the second model is equal to the first")
    return eager, losses, counts


if __name__ == "__main__":
    main()
