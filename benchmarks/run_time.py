"""Run time on plain CPU tensors: eager, inductor, this backend, and the same computation written in JAX.

    JAX_PLATFORMS=cpu python benchmarks/run_time.py

The JAX peer keeps its arguments as JAX arrays; where it trains, it computes loss and new parameters in one program.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable

import _record
import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from _measure import arguments, measure, print_machine, ratio, report, verdict, warm
from _models import GPT2Loss
from torch import nn

Peers = dict[str, Callable[[], object]]


def gelu_like(x):
    """A chain of elementwise operators; works on tensors and arrays."""
    tanh = torch.tanh if isinstance(x, torch.Tensor) else jnp.tanh
    return 0.5 * x * (1 + tanh(0.8 * (x + 0.04 * x**3)))


def elementwise(size: int) -> Peers:
    """`0.5 * x * (1 + tanh(0.8 * (x + 0.04 * x**3)))` on a square."""
    x = torch.randn(size, size)
    array, bare = _array(x), jax.jit(gelu_like)
    peers = {name: (lambda f=f: f(x)) for name, f in _compiled(gelu_like).items()}
    return peers | {"bare JAX": lambda: jax.block_until_ready(bare(array))}


def deep(layers: int, width: int, batch: int) -> Peers:
    """(Linear, Tanh) many times, without gradient."""
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh()))).eval()
    model.requires_grad_(False)
    x = torch.randn(batch, width)
    weights, array = [_array(p) for p in model.parameters()], _array(x)

    @jax.jit
    def bare(weights, x):
        for weight, bias in zip(weights[::2], weights[1::2], strict=True):
            x = jnp.tanh(x @ weight.T + bias)
        return x

    peers = {name: (lambda f=f: f(x)) for name, f in _compiled(model).items()}
    return peers | {"bare JAX": lambda: jax.block_until_ready(bare(weights, array))}


def sgd_step(layers: int, width: int, batch: int) -> Peers:
    """One step of SGD on an MLP with squared error."""
    x, y = torch.randn(batch, width), torch.randn(batch, width)
    peers = {}
    for name in _compiled(nn.Identity()):
        model = _mlp(layers, width)
        forward, optimizer = _compiled(model)[name], torch.optim.SGD(model.parameters(), lr=1e-3)
        peers[name] = functools.partial(_step, lambda x, y, forward=forward: F.mse_loss(forward(x), y), optimizer, x, y)
    return peers | {"bare JAX": _jax_step(_mlp(layers, width), x, y)}


def gpt2_step(layers: int, batch: int, seq: int) -> Peers:
    """One step of SGD on a GPT-2 as wide as GPT-2 small."""
    tokens = torch.randint(8192, (batch, seq))
    peers = {}
    for name in _compiled(nn.Identity()):
        model = GPT2Loss(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        peers[name] = functools.partial(_step, _compiled(model)[name], optimizer, tokens)
    return peers


def resnet(images: int, pixels: int) -> Peers:
    """Inference of ResNet-50."""
    import torchvision

    model, x = torchvision.models.resnet50().eval(), torch.randn(images, 3, pixels, pixels)
    return {name: (lambda f=f: f(x)) for name, f in _compiled(model).items()}


def _step(loss_of: Callable, optimizer: torch.optim.Optimizer, *args: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(*args)
    loss.backward()
    optimizer.step()
    return loss


def _compiled(f: Callable) -> dict[str, Callable]:
    return {
        "eager": f,
        "inductor": torch.compile(f),
        "assume_pure": torch.compile(f, backend="assume_pure"),
    }


def _mlp(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))


def _jax_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable:
    state = {"weights": [_array(p) for p in model.parameters()]}
    inputs, targets = _array(x), _array(y)

    def loss(weights, x, y):
        for weight, bias in zip(weights[::2], weights[1::2], strict=True):
            x = jax.nn.relu(x @ weight.T + bias)
        return jnp.mean((x - y) ** 2)

    @jax.jit
    def update(weights, x, y):
        value, grads = jax.value_and_grad(loss)(weights, x, y)
        return value, [w - 1e-3 * g for w, g in zip(weights, grads, strict=True)]

    def step():
        value, state["weights"] = jax.block_until_ready(update(state["weights"], inputs, targets))
        return value

    return step


def _array(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy().copy())


# ---------------------------------------------------------------------------------------------------------------- main


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured, and what it is to reach.

    Attributes:
        title: For tables.
        make: Makes the peers.
        grad: Whether gradients are recorded.
        rounds: How many are needed at most; large models take long.
        target: How many times faster than eager it is to be, or None.
    """

    title: str
    make: Callable[[], Peers]
    grad: bool
    rounds: int = 1_000
    target: float | None = None

    def run(self, rounds: int) -> None:
        """Measure and print."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.set_grad_enabled(self.grad):
            peers = self.make()
            warm(peers)
            samples = measure(peers, min(rounds, self.rounds))
        report(self.title, samples, "eager")
        for peer in peers:
            _record.point("run-time", peer, self.title.partition(",")[0], ratio(samples, peer, "eager"))
        if self.target is not None:
            verdict(f"{self.title}: eager / assume_pure", ratio(samples, "eager", "assume_pure"), self.target, "times", False)
            verdict(f"{self.title}: assume_pure / inductor", ratio(samples, "assume_pure", "inductor"), 1.0, "times")
        if "bare JAX" in peers:
            verdict(f"{self.title}: assume_pure / bare JAX", ratio(samples, "assume_pure", "bare JAX"), 1.05, "times")


def cases(quick: bool) -> list[Case]:
    """All cases; `quick` divides sizes."""
    size, width, layers = (500, 128, 8) if quick else (4000, 1024, 60)
    blocks, batch, seq = (1, 1, 16) if quick else (2, 2, 128)
    images, pixels = (1, 64) if quick else (2, 224)
    chosen = [
        Case(f"elementwise, {size} x {size}", lambda: elementwise(size), grad=False, target=4.0),
        Case(f"MLP, SGD step of 4 x (Linear {width}, ReLU), batch 512", lambda: sgd_step(4, width, 512), grad=True, target=1.0),
        Case(f"small layers, {layers} x (Linear 256, Tanh), batch 64", lambda: deep(layers, 256, 64), grad=False, target=1.2),
    ]
    if importlib.util.find_spec("transformers"):
        title = f"GPT-2, training step of {blocks} layers of small's width, batch {batch}, {seq} tokens"
        chosen.append(Case(title, lambda: gpt2_step(blocks, batch, seq), grad=True, rounds=6))
    if importlib.util.find_spec("torchvision"):
        title = f"ResNet-50, inference, {images} images of {pixels} x {pixels}"
        chosen.append(Case(title, lambda: resnet(images, pixels), grad=False, rounds=6))
    return chosen


def main() -> None:
    """Run all and print."""
    args = arguments(__doc__, rounds=20).parse_args()
    print_machine()
    for case in cases(args.quick):
        case.run(5 if args.quick else args.rounds)


if __name__ == "__main__":
    main()
