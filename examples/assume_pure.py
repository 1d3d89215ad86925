"""A function in a hot loop that is traced once: `assume_pure`, `PureModule`, random numbers, and what is not pure.

python examples/assume_pure.py [--xla]
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import nn

import pure_backend
from pure_backend import PureModule, assume_pure


def main(argv: list[str] | None = None) -> int:
    """Run all and print.

    Returns:
        How many traces 1,000 calls of one function cost.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xla", action="store_true", help="on xla tensors (needs torch_xla)")
    device = _device(parser.parse_args(argv).xla)

    module = nn.Linear(4, 4).to(device)
    parameters, x = dict(module.named_parameters()), torch.ones(2, 4, device=device)
    before = pure_backend.statistics().traces
    for _ in range(1000):  # a new function object each time
        y = assume_pure(lambda p, x: torch.func.functional_call(module, p, (x,)))(parameters, x)
    traces = pure_backend.statistics().traces - before
    print(f"1000 calls, {traces} trace(s); equal to eager: {torch.allclose(y, module(x), atol=1e-6)}")

    model = PureModule(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)).to(device))
    model(x).sum().backward()
    print("batches that BatchNorm saw:", model._module[1].num_batches_tracked.item())

    noisy = assume_pure(lambda x: x + torch.rand(2, device=x.device), add_rng_seed_argument=True)
    zeros = torch.zeros(2, device=device)
    print("seeds 1, 1, 2:", [noisy(zeros, rng_seed=seed).tolist() for seed in (1, 1, 2)])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pure_backend.ImpureFunctionWarning)
        assume_pure(needs_a_value)(x)
    print("found:", next(str(w.message) for w in caught if w.category is pure_backend.ImpureFunctionWarning))
    return traces


def needs_a_value(x: torch.Tensor) -> torch.Tensor:
    """Not pure: the host has to know a sum."""
    return x * 2 if x.sum().item() > 0 else x * 3


def _device(xla: bool) -> torch.device:
    if not xla:
        return torch.device("cpu")
    import torch_xla

    return torch_xla.device()


if __name__ == "__main__":
    main()
