"""Greedy decoding with a static key/value cache that a Pallas kernel updates in place: one executable for all tokens.

    python examples/kv_cache_decode.py [--layers 4] [--tokens 32]

The step takes the last token and a position that are tensors on the device, writes the new keys and values into the caches with
`kv_cache_update_`, and moves the position on. It is run eagerly and compiled, on plain CPU tensors and, where torch_xla is, on
`xla` tensors, there also with torch_xla's own backend `openxla`. All give the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from seed_decoder import Attention, DecoderConfig, SeedDecoder
from torch import nn

import pure_backend
from pure_backend.custom_ops.kernels import kv_cache_update_

HAS_XLA = importlib.util.find_spec("torch_xla") is not None


class CachedDecoder(nn.Module):
    """One step of decoding with the weights of a seed decoder."""

    def __init__(self, decoder: SeedDecoder, batch: int, length: int, config: DecoderConfig) -> None:
        super().__init__()
        self.decoder = decoder
        shape = (batch, config.heads, length, config.hidden // config.heads)
        for i in range(config.layers):
            self.register_buffer(f"keys_{i}", torch.zeros(shape))
            self.register_buffer(f"values_{i}", torch.zeros(shape))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("places", torch.arange(length))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """`i64[batch, 1]`, the last token -> `i64[batch, 1]`, the next; the caches and the position move on."""
        x = self.decoder.embedding(token)
        seen = (self.places <= self.position)[None, None, None, :]
        for i, block in enumerate(self.decoder.blocks):
            x = x + self.attend(block.attention, block.attention_norm(x), i, seen)
            x = x + block.mlp(block.mlp_norm(x))
        self.position.add_(1)
        return self.decoder.head(self.decoder.norm(x)).argmax(-1)

    def attend(self, attention: Attention, x: torch.Tensor, layer: int, seen: torch.Tensor) -> torch.Tensor:
        """Attention of one token, `f32[batch, 1, hidden]`, to all that are in the cache."""
        query, key, value = (attention._split(project(x)) for project in (attention.query, attention.key, attention.value))
        keys, values = getattr(self, f"keys_{layer}"), getattr(self, f"values_{layer}")
        kv_cache_update_(keys, key, self.position)
        kv_cache_update_(values, value, self.position)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        return attention.output(mixed.transpose(1, 2).flatten(2))


@dataclasses.dataclass(frozen=True)
class Run:
    """What one way of decoding gave.

    Attributes:
        name: Where and how.
        tokens: The tokens of the first sequence.
        host_ms: Median milliseconds until a step has returned; on `xla` it then still has to run.
        lowerings: Programs that pure_backend lowered after the first token.
    """

    name: str
    tokens: list[int]
    host_ms: float
    lowerings: int


@torch.no_grad()
def decode(name: str, step: Callable[[torch.Tensor], torch.Tensor], device: torch.device, count: int) -> Run:
    """Decode that many tokens."""
    finish = _sync if device.type == "xla" else (lambda: None)
    token = torch.tensor([[3], [5]], device=device)
    tokens, times, lowerings = [], [], 0
    for i in track(range(count), description=name, transient=True):
        started = time.perf_counter()
        token = step(token)
        times.append(time.perf_counter() - started)
        finish()
        tokens.append(token)
        if i == 0:
            lowerings = pure_backend.statistics().lowerings
    values = [int(token[0, 0]) for token in tokens]
    return Run(name, values, 1e3 * statistics.median(times[2:]), pure_backend.statistics().lowerings - lowerings)


def _sync() -> None:
    import torch_xla

    torch_xla.sync(wait=True)


def main(argv: list[str] | None = None) -> list[Run]:
    """Decode in every way that there is here, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args(argv)
    config = DecoderConfig(layers=args.layers, hidden=args.hidden, intermediate=2 * args.hidden)
    torch.manual_seed(0)
    seed = CachedDecoder(SeedDecoder(config).eval(), 2, args.tokens, config)
    ways = [("cpu", "eager"), ("cpu", "assume_pure")]
    if HAS_XLA:
        ways += [("xla", "lazy"), ("xla", "openxla"), ("xla", "assume_pure")]
    runs = []
    for place, how in ways:
        torch._dynamo.reset()
        device = torch.device("cpu") if place == "cpu" else _xla_device()
        model = copy.deepcopy(seed).to(device)
        step = model if how in ("eager", "lazy") else torch.compile(model, backend=how, fullgraph=True)
        runs.append(decode(f"{place} {how}", step, device, args.tokens))
    table = Table("decoding", "host ms a token", "lowerings after the first token", "first tokens")
    for run in runs:
        table.add_row(run.name, f"{run.host_ms:.2f}", str(run.lowerings), " ".join(map(str, run.tokens[:8])))
    Console().print(table)
    return runs


def _xla_device() -> torch.device:
    import torch_xla

    return torch_xla.device()


if __name__ == "__main__":
    main()
