"""What a call of a `jax_op` costs beside a bare jitted JAX function, on plain and on `xla` tensors.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks/custom_ops.py

On `xla` tensors the time is host time, until the operator is in the lazy graph; the graph runs outside the timed part.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import torch
from _measure import arguments, difference, measure, median, print_machine, report, verdict, warm

from pure_backend import jax_op


def scaled(x: jax.Array, y: jax.Array, by: float = 2.0) -> jax.Array:
    """Little work."""
    return jnp.sin(x) * y * by


op = jax_op("benchmarks::scaled", scaled)


def plain_tensors(rounds: int) -> None:
    """The operator against the jitted function, without and with gradient."""
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    leaf = x.clone().requires_grad_()
    a, b = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    jitted = jax.jit(scaled)
    grad = jax.jit(jax.value_and_grad(lambda x, y: scaled(x, y).sum()))

    def step():
        leaf.grad = None
        out = op(leaf, y)
        out.backward(y)
        return leaf.grad

    def bare_step():
        value, g = grad(a, b)
        return value.block_until_ready(), g

    def without_gradient():
        with torch.no_grad():
            return op(x, y)

    peers = {
        "bare jitted": lambda: jitted(a, b).block_until_ready(),
        "jax_op": lambda: op(x, y),
        "jax_op, no_grad": without_gradient,
        "bare value_and_grad": bare_step,
        "jax_op, forward + backward": step,
    }
    warm(peers)
    samples = measure(peers, rounds)
    report("plain tensors", samples, "bare jitted", "us")
    verdict("jax_op over the bare jitted call", 1e6 * difference(samples, "jax_op", "bare jitted"), 50.0, "us")


def xla_tensors(rounds: int) -> None:
    """Host time of the operator in torch_xla's lazy graph."""
    import torch_xla

    x, y = torch.randn(4, 16, device=torch_xla.device()), torch.randn(4, 16, device=torch_xla.device())
    torch_xla.sync(wait=True)
    peers = {"jax_op": lambda: op(x, y), "lazy operators": lambda: torch.sin(x) * y * 2.0}
    finish = lambda: torch_xla.sync(wait=True)  # noqa: E731
    warm(peers, finish)
    samples = measure(peers, rounds, finish)
    report("xla tensors, host time", samples, "lazy operators", "us")
    verdict("jax_op on xla", 1e3 * median(samples["jax_op"]), 1.0, "ms")


def main() -> None:
    """Run all and print."""
    args = arguments(__doc__, rounds=500).parse_args()
    rounds = 30 if args.quick else args.rounds
    print_machine()
    plain_tensors(rounds)
    if importlib.util.find_spec("torch_xla") is not None:
        xla_tensors(rounds)


if __name__ == "__main__":
    main()
