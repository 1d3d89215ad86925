"""Train one model over several processes as one program: DTensor placements say what lies where, XLA does the rest.

torchrun --nproc-per-node 2 examples/train_sharded.py --mode dp
torchrun --nproc-per-node 2 examples/train_sharded.py --mode fsdp
torchrun --nproc-per-node 2 examples/train_sharded.py --mode tp
torchrun --nproc-per-node 4 examples/train_sharded.py --mode dp_tp
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import pure_backend

WIDTH, ROWS = 256, 32
WHOLE, CUT = Replicate(), Shard(0)


class Block(nn.Module):
    """A residual block: f32[rows, WIDTH] -> f32[rows, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


# the axes of the mesh; placements by name, one for each axis; placements of the batch
MODES = {
    "dp": (("dp",), {}, [CUT]),
    "fsdp": (("dp",), {"*": [CUT]}, [CUT]),
    "tp": (("tp",), {"*.up.*": [CUT], "*.down.weight": [Shard(1)]}, [WHOLE]),
    "dp_tp": (("dp", "tp"), {"*.up.*": [WHOLE, CUT], "*.down.weight": [WHOLE, Shard(1)]}, [CUT, WHOLE]),
}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; the losses, which are the same on every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="fsdp")
    parser.add_argument("--steps", type=int, default=10)
    chosen = parser.parse_args(argv)
    dist.init_process_group("gloo")
    pure_backend.distributed.initialize()
    axes, rules, batch = MODES[chosen.mode]
    ranks = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (ranks,) if len(axes) == 1 else (2, ranks // 2), mesh_dim_names=axes)

    torch.manual_seed(0)  # every rank starts from the same values
    model = pure_backend.distributed.shard(nn.Sequential(Block(), Block()), mesh, rules)
    step = pure_backend.TrainStep(model, torch.optim.AdamW(model.parameters()), nn.functional.mse_loss, batch=batch)
    parts, own = (mesh.size(0), mesh.get_local_rank(0)) if "dp" in axes else (1, 0)
    losses = []
    for _ in range(chosen.steps):
        x = torch.randn(ROWS, WIDTH)  # the same numbers on every rank, of which each takes its part
        losses.append(step(x.chunk(parts)[own], x.chunk(parts)[own].roll(1, 1)).item())
    kept = sum(p.to_local().nbytes for p in model.parameters())
    if dist.get_rank() == 0:
        print(f"{chosen.mode}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {kept / 1e6:.2f} MB of parameters a rank")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
