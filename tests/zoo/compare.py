"""A compiled model beside its eager copy: the same steps on both, and how far apart they end."""

import copy
import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .models import Batch, ZooModel

BACKEND = os.environ.get("ZOO_BACKEND", "assume_pure")
"""Another backend (`ZOO_BACKEND=eager`) checks the zoo itself."""

if importlib.util.find_spec("torch_xla"):
    import torch_xla

    # At the first backward of a process, autograd makes a queue for each device there is. A device opened
    # later, be torch_xla imported or not, has none, and its first backward fails an internal assertion.
    torch_xla.device()


@dataclass(frozen=True)
class Worst:
    """The largest difference among named tensors, and the name it was found under."""

    size: float = 0.0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.size:.1e} {self.name}".rstrip()


@dataclass(frozen=True)
class Difference:
    """How far a compiled step is from the eager one.

    Args:
        loss: Difference of the losses, relative.
        gradients: Largest difference in a gradient, relative to the largest gradient of the model.
        buffers: Largest difference in a buffer, relative to that buffer's largest entry or 1.
        presence: Parameters with a gradient on one side only.
    """

    loss: float
    gradients: Worst = Worst()
    buffers: Worst = Worst()
    presence: tuple[str, ...] = ()


class Pair:
    """A model compiled on a device, and its copy that runs eagerly on the CPU.

    Args:
        entry: The model of the zoo.
        device: "cpu" or "xla".
        fullgraph: Overrides what the zoo says of the model.
    """

    def __init__(self, entry: ZooModel, device: str = "cpu", fullgraph: bool | None = None) -> None:
        self.reference, self._make_batch = entry.build()
        self.device = torch_xla.device() if device == "xla" else torch.device(device)
        self.module = _moved(copy.deepcopy(self.reference), self.device)
        torch._dynamo.reset()  # wrappers share one `forward`, and with it one recompile limit
        whole = entry.fullgraph if fullgraph is None else fullgraph
        self.compiled = torch.compile(self.module, backend=BACKEND, fullgraph=whole)
        self._optimizers = [_optimizer(entry.optimizer, m) for m in (self.reference, self.module)]

    def train(self, seed: int) -> Difference:
        """One forward and backward on each side."""
        batch = self._make_batch(seed)
        expected = self.reference(**batch)
        expected.backward()
        loss = self.compiled(**self._to_device(batch))
        loss.backward()
        self._sync()
        return self._difference(loss.detach(), expected.detach(), gradients=True)

    def step(self) -> None:
        """One step of the optimizer on each side; gradients are dropped."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._sync()

    def evaluate(self, seed: int) -> Difference:
        """One forward in evaluation mode, without gradients, on each side."""
        batch = self._make_batch(seed)
        self.reference.eval()
        self.compiled.eval()
        with torch.no_grad():
            expected = self.reference(**batch)
            loss = self.compiled(**self._to_device(batch))
        self._sync()
        return self._difference(loss, expected, gradients=False)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device) for name, value in batch.items()}

    def _sync(self) -> None:
        if self.device.type == "xla":
            torch_xla.sync()

    def _difference(self, loss: torch.Tensor, expected: torch.Tensor, gradients: bool) -> Difference:
        relative = abs(loss.item() - expected.item()) / abs(expected.item())
        buffers = _worst(_buffer_differences(self.module, self.reference))
        if not gradients:
            return Difference(_strict(relative), buffers=buffers)
        return Difference(
            _strict(relative),
            _worst(_gradient_differences(self.module, self.reference)),
            buffers,
            tuple(_one_sided_gradients(self.module, self.reference)),
        )


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """`module.to(device)` that keeps parameters tied: on `xla` a tied one would become two."""
    if device.type == "cpu":
        return module
    tied: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, []).append(name)
    groups = list(tied.values())
    module = module.to(device)
    for first, *others in groups:
        parameter = module.get_parameter(first)
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, parameter)
    return module


def _optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose step is a continuous function of the gradients.

    AdamW's first step is `g / (|g| + eps)`: the sign of rounding noise where the true gradient is 0 (the bias
    of a key projection, say). An `eps` above the noise leaves it near 0.
    """
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=0.003, eps=1e-3)


def _strict(size: float) -> float:
    """`size`, NaN made infinite, so that no comparison passes by it."""
    return size if size == size else float("inf")


def _worst(differences: Iterable[Worst]) -> Worst:
    return max(differences, key=lambda worst: worst.size, default=Worst())


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    return _strict((ours.cpu().double() - expected.double()).abs().max().item())


def _gradient_differences(module: nn.Module, reference: nn.Module) -> Iterator[Worst]:
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and name in expected:
            yield Worst(_distance(parameter.grad, expected[name]) / scale, name)


def _one_sided_gradients(module: nn.Module, reference: nn.Module) -> Iterator[str]:
    ours, expected = ({n for n, p in m.named_parameters() if p.grad is not None} for m in (module, reference))
    yield from (f"{name} has no gradient" for name in sorted(expected - ours))
    yield from (f"{name} has a gradient, eager has None" for name in sorted(ours - expected))


def _buffer_differences(module: nn.Module, reference: nn.Module) -> Iterator[Worst]:
    for (name, ours), (_, expected) in zip(module.named_buffers(), reference.named_buffers(), strict=True):
        scale = max(1.0, expected.abs().max().item()) if expected.is_floating_point() and expected.numel() else 1.0
        yield Worst(_distance(ours, expected) / scale, name)
