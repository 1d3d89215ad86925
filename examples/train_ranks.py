"""Train on several processes with torch's own wrappers, compiled by this backend on each rank:

torchrun --nproc-per-node 2 examples/train_ranks.py --mode ddp
torchrun --nproc-per-node 2 examples/train_ranks.py --mode fsdp
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pure_backend

WIDTH, ROWS = 256, 32


class Block(nn.Module):
    """A residual block: f32[rows, WIDTH] -> f32[rows, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks. A class of one's own: Dynamo never looks into a wrapped `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The model's output."""
        for block in self.blocks:
            x = block(x)
        return x


def wrapped(mode: str) -> nn.Module:
    """The model for all ranks, equal on each."""
    torch.manual_seed(0)
    model = Model()
    if mode == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(mode: str, steps: int, backend: str = "assume_pure") -> list[float]:
    """Losses, the mean of all ranks', each rank training on rows of its own."""
    model = wrapped(mode)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps):
        loss = nn.functional.mse_loss(compiled(x), x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """Train and tell what was compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    losses = train(args.mode, args.steps)
    if dist.get_rank() == 0:
        calls = pure_backend.statistics().calls
        print(f"{args.mode}, {dist.get_world_size()} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {calls} compiled calls")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
