"""What the forward keeps for the backward, and what that costs in run time, by the option `remat`; plain CPU tensors.

    JAX_PLATFORMS=cpu python benchmarks/residuals.py

Residuals that are inputs, such as parameters, are kept without a copy and not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import _record
import torch
from _measure import arguments, measure, print_machine, print_table, ratio, report, verdict, warm
from _models import DecoderLoss, GPT2Loss
from torch import nn

import pure_backend

REMAT = ("none", "auto", "full")


def kept(model: nn.Module, tokens: torch.Tensor, remat: str) -> tuple[int, int]:
    """Number and bytes of fresh residuals."""
    partitions = pure_backend.explain(model, remat=remat)(tokens).partitions
    return sum(p.residuals for p in partitions), sum(p.residual_bytes for p in partitions)


def step(model: nn.Module, tokens: torch.Tensor, remat: str) -> Callable[[], object]:
    """Forward and backward, with gradients made anew."""
    compiled = torch.compile(model, backend="assume_pure", options={"remat": remat})
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(compiled(tokens), parameters)


def compare(title: str, model: nn.Module, tokens: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Measure a model under each policy.

    Returns:
        Bytes and run time of `auto` in units of `none`.
    """
    torch._dynamo.reset()
    found = {remat: kept(model, tokens, remat) for remat in REMAT}
    peers = {f"remat={remat}": step(model, tokens, remat) for remat in REMAT}
    warm(peers)
    samples = measure(peers, rounds)
    _, most = found["none"]
    rows = [(remat, str(count), f"{size / 1e6:.2f}", f"{size / most:.3f}") for remat, (count, size) in found.items()]
    print_table(f"{title}: residuals", ("remat", "fresh residuals", "MB", "/ none"), rows)
    for remat, (_, size) in found.items():
        _record.point("residuals", f"remat={remat}", title, size / 1e6)
    report(f"{title}: forward + backward", samples, "remat=none")
    return found["auto"][1] / most, ratio(samples, "remat=auto", "remat=none")


def main() -> None:
    """Run both models and print."""
    args = arguments(__doc__, rounds=20).parse_args()
    layers, gpt_layers, width, batch, seq, rounds = (2, 1, 96, 2, 16, 5) if args.quick else (8, 4, 384, 4, 128, args.rounds)
    print_machine()
    tokens = torch.randint(256, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    size, time = compare(f"seed decoder, {layers} layers", DecoderLoss(layers), tokens, rounds)
    verdict("residual bytes of auto against none, seed decoder", size, 0.4, "times")
    verdict("run time of auto against none, seed decoder", time, 1.05, "times")
    compare(f"GPT-2, {gpt_layers} layers of {width}", GPT2Loss(gpt_layers, width), tokens, rounds)


if __name__ == "__main__":
    main()
