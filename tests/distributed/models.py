"""What the ranks train, and eager twins to hold it against."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import pure_backend

WIDTH = 256


class Block(nn.Module):
    """A residual block of the user's own: f32[batch, WIDTH] -> f32[batch, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def twins(make: Callable[[], nn.Module] = Model) -> tuple[nn.Module, nn.Module]:
    """Two equal models, the same on each rank."""
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def batch(step: int = 0, size: int = 8) -> torch.Tensor:
    """This rank's own part of a batch."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(size, WIDTH, generator=generator)


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by name, whole ones for those of DTensors."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name.replace("_orig_mod.", "").removeprefix("module."): whole(grad) for name, grad in found.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def agree(model: nn.Module, reference: nn.Module, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Both have gradients for the same parameters, and equal ones."""
    got, want = gradients(model), gradients(reference)
    assert got and list(got) == list(want), (list(got), list(want))
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def alike(model: nn.Module, reference: nn.Module, most: float = 0.02) -> None:
    """The same for 16-bit floats: gradients differ by a small part of their norm."""
    got, want = gradients(model), gradients(reference)
    assert got and list(got) == list(want), (list(got), list(want))
    far = {name: float((got[name].float() - grad.float()).norm() / grad.float().norm()) for name, grad in want.items()}
    assert max(far.values()) <= most, far


def equal_on_all_ranks(model: nn.Module) -> None:
    """All ranks have the same bits."""
    flat = torch.cat([grad.flatten().float() for grad in gradients(model).values()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first)


class Counted:
    """What was compiled and called in a block: `with Counted() as counted: ...; counted.traces`."""

    def __enter__(self) -> Counted:
        self.before = pure_backend.statistics()
        return self

    def __exit__(self, *error: object) -> None:
        after = pure_backend.statistics()
        self.traces, self.calls = after.traces - self.before.traces, after.calls - self.before.calls
