"""Run time on plain CPU tensors: eager, inductor, this backend, and the same computation written in JAX.

    JAX_PLATFORMS=cpu python benchmarks/run_time.py

The JAX peer keeps its arguments as JAX arrays; where it trains, it computes loss and new parameters in one program.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from _measure import arguments, measure, print_machine, report, warm
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
        peers[name] = _torch_step(_compiled(model)[name], torch.optim.SGD(model.parameters(), lr=1e-3), x, y)
    return peers | {"bare JAX": _jax_step(_mlp(layers, width), x, y)}


def _compiled(f: Callable) -> dict[str, Callable]:
    return {
        "eager": f,
        "inductor": torch.compile(f),
        "assume_pure": torch.compile(f, backend="assume_pure"),
    }


def _mlp(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))


def _torch_step(forward: Callable, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Callable:
    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


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


def main() -> None:
    """Run all and print."""
    args = arguments(__doc__, rounds=30).parse_args()
    rounds, small = (5, True) if args.quick else (args.rounds, False)
    print_machine()
    torch.manual_seed(0)
    cases = {
        f"elementwise on {4000 >> 3 * small} x {4000 >> 3 * small}": (elementwise, (4000 >> 3 * small,), torch.no_grad),
        f"SGD step, 4 x (Linear {1024 >> 3 * small}, ReLU), batch 512": (
            sgd_step,
            (4, 1024 >> 3 * small, 512),
            torch.enable_grad,
        ),
        f"{60 >> 3 * small} x (Linear 256, Tanh), batch 64, no grad": (deep, (60 >> 3 * small, 256, 64), torch.no_grad),
    }
    for title, (make, sizes, mode) in cases.items():
        torch._dynamo.reset()
        with mode():
            peers = make(*sizes)
            warm(peers)
            report(title, measure(peers, rounds), "eager")


if __name__ == "__main__":
    main()
