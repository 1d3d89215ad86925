"""What a training step would cost on a slice of TPUs. No TPU is needed:

python -m pure_backend plan examples/plan_slices.py:fully_sharded --topology v5e:4x4 --mesh fsdp=16
python -m pure_backend plan examples/plan_slices.py:data_and_tensor_parallel --topology v5e:4x4 --mesh dp=4,tp=4
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard

from pure_backend import TrainStep

WIDTH, BLOCKS, ROWS = 256, 2, 1024


class Block(nn.Module):
    """A residual block: f32[rows, WIDTH] -> f32[rows, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def step() -> tuple[TrainStep, tuple[torch.Tensor, torch.Tensor]]:
    """A step of AdamW and a batch."""
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainStep(model, optimizer, nn.functional.mse_loss), (torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))


def fully_sharded():
    """Each parameter and its moments cut along their first dimension."""
    return (*step(), {"mesh": {"fsdp": 4}, "rules": {"*": Shard(0)}})


def data_and_tensor_parallel():
    """Matrices cut over `tp` as Megatron does, the batch over `dp`."""
    rules = {"*.up.*": ("tp",), "*.down.weight": (None, "tp")}
    return (*step(), {"mesh": {"dp": 2, "tp": 2}, "rules": rules})
