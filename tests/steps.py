"""Training loops side by side: the eager loop on the CPU as the oracle, and `TrainStep` on the device under test."""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn

from pure_backend import TrainStep


def sync(device: torch.device) -> None:
    """Run what is pending, as a loop on `xla` does after each step."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def twins(make: Callable[[], nn.Module], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The same model on the CPU and on the device."""
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model).to(device)
    sync(device)
    return model, other


def batches(count: int, *shapes: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Batches of random numbers."""
    torch.manual_seed(3)
    return [tuple(torch.randn(shape) for shape in shapes) for _ in range(count)]


def eager_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[tuple[torch.Tensor, ...]],
    loss_fn: Callable = nn.functional.mse_loss,
    clip: float | None = None,
    after: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """The loop that everybody writes."""
    losses = []
    for *inputs, target in data:
        optimizer.zero_grad()
        loss = loss_fn(model(*inputs), target)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after()
        losses.append(loss.detach())
    return losses


def step_loop(
    step: TrainStep,
    data: Iterable[tuple[torch.Tensor, ...]],
    device: torch.device,
    after: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """The same with `TrainStep`."""
    losses = []
    for batch in data:
        losses.append(step(*(t.to(device) for t in batch)))
        sync(device)
        after()
    return [loss.cpu() for loss in losses]


def difference(want: dict, got: dict) -> float:
    """The largest difference between two state dicts, which must have the same keys, shapes and dtypes."""
    assert list(want) == list(got), (list(want), list(got))
    return max((_leaf(str(key), want[key], got[key]) for key in want), default=0.0)


def _leaf(name: str, want, got) -> float:
    if isinstance(want, dict):
        return difference(want, got)
    if isinstance(want, (list, tuple)):
        assert len(want) == len(got), name
        return max((_leaf(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(want, got, strict=True))), default=0.0)
    if not isinstance(want, torch.Tensor):
        assert want == got, (name, want, got)
        return 0.0
    assert (want.shape, want.dtype) == (got.shape, got.dtype), (name, want, got)
    assert torch.equal(want.isfinite(), got.cpu().isfinite()), name
    return (want.double() - got.cpu().double()).abs().max().item() if want.numel() and not want.is_complex() else 0.0
