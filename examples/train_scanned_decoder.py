"""A deep decoder trained with its layers one by one and as one loop (`scan_layers`): the same losses, less compilation.

python examples/train_scanned_decoder.py [--layers 50] [--steps 5] [--xla]
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from rich.console import Console
from rich.table import Table
from seed_decoder import DecoderConfig, SeedDecoder, counting_batches, next_token_loss
from torch import nn

from pure_backend import scan_layers


class ScannedDecoder(nn.Module):
    """A seed decoder whose blocks run as one loop; it holds the decoder's own parameters."""

    def __init__(self, decoder: SeedDecoder, checkpoint: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.checkpoint = checkpoint

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`i64[batch, seq]` -> `f32[batch, seq, vocab]`."""
        decoder = self.decoder
        x = scan_layers(decoder.blocks, decoder.embedding(tokens), checkpoint=self.checkpoint)
        return decoder.head(decoder.norm(x))


def train(model: nn.Module, batches: list[torch.Tensor], device: torch.device) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for batch in batches:
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = next_token_loss(model(batch[:, :-1].to(device)), batch[:, 1:].to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, seconds


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Train three ways and print a table.

    Returns:
        The losses of each way.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--xla", action="store_true", help="on xla tensors (needs torch_xla)")
    args = parser.parse_args(argv)
    device = torch.device("cpu")
    if args.xla:
        import torch_xla

        device = torch_xla.device()
    config = DecoderConfig(layers=args.layers, hidden=args.hidden, intermediate=4 * args.hidden)
    torch.manual_seed(0)
    seed, batches = SeedDecoder(config), counting_batches(args.steps, batch=2, seq=8, vocab=config.vocab)
    table = Table("blocks", "first step s", "last step ms", "first loss", "last loss")
    losses = {}
    for name, wrap in {
        "one by one, compiled": lambda decoder: torch.compile(decoder, backend="assume_pure"),
        "as one loop": lambda decoder: ScannedDecoder(decoder, checkpoint=False),
        "as one loop, checkpointed": lambda decoder: ScannedDecoder(decoder, checkpoint=True),
    }.items():
        losses[name], seconds = train(wrap(copy.deepcopy(seed).to(device)), batches, device)
        numbers = (seconds[0], 1e3 * seconds[-1], losses[name][0], losses[name][-1])
        table.add_row(name, *(f"{number:.4g}" for number in numbers))
    Console().print(table)
    return losses


if __name__ == "__main__":
    main()
