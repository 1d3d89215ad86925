"""Ten steps of AdamW in each of the ways that this package trains, and in eager as the oracle, in f32 and in f64.

Everything changes in place: parameters and states by the optimizer, the batch by the loop.
"""

import copy
import dataclasses
from collections.abc import Callable

import torch
from steps import sync
from torch import nn

from pure_backend import PureModule, TrainStep, assume_pure

from .models import Batch, with_scanned_layers

STEPS = 10

Step = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training left.

    Attributes:
        losses: Of each step.
        state: Parameters and buffers after the last, by place.
    """

    losses: torch.Tensor
    state: list[torch.Tensor]

    def distance(self, other: "Trained") -> list[float]:
        """How far apart two runs are: in their losses, and in each tensor of the state, relative to its length."""
        pairs = zip([self.losses, *self.state], [other.losses, *other.state], strict=True)
        return [_relative(ours.double().cpu(), theirs.double()) for ours, theirs in pairs]


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    distance = (ours - theirs).norm().item() / max(theirs.norm().item(), 1.0)
    return distance if distance == distance else float("inf")


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # without eps a gradient of zero steps by its noise's sign


def _looped(model: nn.Module, batch: Batch, loss_of: Callable[..., torch.Tensor]) -> Step:
    """The loop that everybody writes."""
    optimizer = _optimizer(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _eager(model: nn.Module, batch: Batch) -> Step:
    return _looped(model, batch, model)


def _compiled(model: nn.Module, batch: Batch) -> Step:
    return _looped(model, batch, torch.compile(model, backend="assume_pure"))


def _assumed_pure(model: nn.Module, batch: Batch) -> Step:
    return _looped(model, batch, assume_pure(lambda **given: model(**given)))


def _pure_module(model: nn.Module, batch: Batch) -> Step:
    return _looped(model, batch, PureModule(model))


def _scanned(model: nn.Module, batch: Batch) -> Step:
    scanned = with_scanned_layers(model)
    return _looped(scanned, batch, scanned)


def _train_step(model: nn.Module, batch: Batch) -> Step:
    step = TrainStep(model, _optimizer(model))
    return lambda: step(**batch)


WAYS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "torch.compile": _compiled,
    "assume_pure": _assumed_pure,
    "PureModule": _pure_module,
    "scan_layers": _scanned,
    "TrainStep": _train_step,
}


def eager(model: nn.Module, batches: list[Batch], dtype: torch.dtype) -> Trained:
    """The oracle."""
    return _train(_eager, copy.deepcopy(model).to(dtype), batches, torch.device("cpu"), dtype)


def trained(way: str, model: nn.Module, batches: list[Batch], device: torch.device) -> Trained:
    """A copy of the model trained on a device."""
    moved = copy.deepcopy(model).to(device)
    for module in moved.modules():
        if hasattr(module, "tie_weights"):  # torch_xla makes two parameters of a tied one
            module.tie_weights()
    return _train(WAYS[way], moved, batches, device, torch.float32)


def _train(
    way: Callable[[nn.Module, Batch], Step], model: nn.Module, batches: list[Batch], device: torch.device, dtype
) -> Trained:
    batch = {name: _on(value, device, dtype) for name, value in batches[0].items()}
    step = way(model, batch)
    losses = []
    for given in batches:
        for name, value in given.items():
            batch[name].copy_(value)
        losses.append(step())
        sync(device)
    state = [*model.parameters(), *model.buffers()]
    return Trained(torch.stack([loss.cpu() for loss in losses]), [tensor.detach().cpu() for tensor in state])


def _on(value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(value, device=device, dtype=dtype if value.is_floating_point() else value.dtype)
