"""A whole training step: `TrainStep` against the eager loop, inductor with an eager optimizer, and a hand-written JAX step.

    JAX_PLATFORMS=cpu python benchmarks/train_step.py

The model is 60 x (Linear 256, Tanh), the batch 64, the optimizer SGD; all peers start from the same weights. The hand-written
step is `jax.jit(step, donate_argnums=0)`. On `xla` tensors host time is measured, until a step's graph is built; it runs to its
end between the calls, outside of the timed part.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from _measure import Samples, arguments, measure, print_machine, ratio, report, verdict, warm
from torch import nn

from pure_backend import TrainStep

LEARNING_RATE = 1e-3


def model(layers: int, width: int) -> nn.Sequential:
    """The deep thin stack."""
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())))


def torch_loop(net: nn.Module, forward: Callable, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The training loop's body that everybody writes."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)

    def step():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def whole_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor, donate: bool = True) -> Callable[[], torch.Tensor]:
    """The same loop by `TrainStep`."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    step = TrainStep(net, optimizer, nn.functional.mse_loss, donate=donate)
    return lambda: step(x, y)


def jax_step(net: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> Callable[[], jax.Array]:
    """The same loop as somebody writes it in JAX."""
    weights = [(jnp.asarray(m.weight.detach().numpy().T), jnp.asarray(m.bias.detach().numpy())) for m in net[::2]]
    x, y = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

    def loss_of(weights, x, y):
        for w, b in weights:
            x = jnp.tanh(x @ w + b)
        return ((x - y) ** 2).mean()

    def step(weights, x, y):
        loss, grads = jax.value_and_grad(loss_of)(weights, x, y)
        return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, weights, grads), loss

    compiled = jax.jit(step, donate_argnums=0)
    state = [weights]

    def call():
        state[0], loss = compiled(state[0], x, y)
        return loss.block_until_ready()

    return call


def plain(layers: int, width: int, rounds: int) -> Samples:
    """All peers on plain tensors."""
    net, x, y = model(layers, width), torch.randn(64, width), torch.randn(64, width)
    nets = [copy.deepcopy(net) for _ in range(4)]
    peers = {
        "JAX": jax_step(net, x, y),
        "TrainStep": whole_step(nets[0], x, y),
        "TrainStep, donate=False": whole_step(nets[1], x, y, donate=False),
        "eager": torch_loop(nets[2], nets[2], x, y),
        "inductor + eager SGD": torch_loop(nets[3], torch.compile(nets[3]), x, y),
    }
    warm(peers)
    return measure(peers, rounds)


def on_xla(layers: int, width: int, rounds: int) -> Samples:
    """Host time on `xla` tensors."""
    import torch_xla

    device = torch_xla.device()
    net = model(layers, width)
    x, y = torch.randn(64, width).to(device), torch.randn(64, width).to(device)
    nets = [copy.deepcopy(net).to(device) for _ in range(3)]
    torch_xla.sync(wait=True)
    peers = {
        "TrainStep": whole_step(nets[0], x, y),
        "assume_pure + lazy SGD": torch_loop(nets[1], torch.compile(nets[1], backend="assume_pure"), x, y),
        "lazy": torch_loop(nets[2], nets[2], x, y),
    }
    after = lambda: torch_xla.sync(wait=True)  # noqa: E731
    warm(peers, after)
    return measure(peers, rounds, after)


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, rounds=40).parse_args()
    layers, width = (4, 32) if options.quick else (60, 256)
    rounds = 3 if options.quick else options.rounds
    if importlib.util.find_spec("torch_xla"):
        import torch_xla

        torch_xla.device()  # before any backward
    print_machine()
    samples = plain(layers, width, rounds)
    report(f"plain tensors, {layers} x (Linear {width}, Tanh), batch 64, SGD", samples, "JAX")
    verdict("a step over the hand-written JAX step", ratio(samples, "TrainStep", "JAX"), 1.05, "times")
    verdict("eager over a step", ratio(samples, "eager", "TrainStep"), 1.5, "times", at_most=False)
    if importlib.util.find_spec("torch_xla"):
        samples = on_xla(layers, width, rounds)
        report("xla tensors, host time", samples, "TrainStep")
        peer = "assume_pure + lazy SGD"
        verdict("a step over forward + backward + lazy optimizer", ratio(samples, "TrainStep", peer), 0.5, "times")


if __name__ == "__main__":
    main()
