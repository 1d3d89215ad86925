"""The seed decoder: a small language model for the examples and the benchmarks.

Pre-norm blocks of causal attention and a gated MLP, 9 parameters a block, so that 100 layers have 900. It is written in plain
torch operations that every device has; there are no position embeddings, the causal mask alone tells positions apart.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a seed decoder."""

    layers: int = 8
    hidden: int = 128
    intermediate: int = 1024
    heads: int = 4
    vocab: int = 256


class RMSNorm(nn.Module):
    """Scale to a root mean square of one (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`f32[..., size]` -> the same."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, config.hidden, bias=False)
        self.value = nn.Linear(config.hidden, config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`f32[batch, seq, hidden]` -> the same."""
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """`f32[batch, seq, hidden]` -> `f32[batch, heads, seq, hidden / heads]`."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class GatedMLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`f32[batch, seq, hidden]` -> the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden)
        self.mlp = GatedMLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`f32[batch, seq, hidden]` -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class SeedDecoder(nn.Module):
    """Token ids to next-token logits.

    Example:
        >>> SeedDecoder(DecoderConfig(layers=1))(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 256])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`i64[batch, seq]` -> `f32[batch, seq, vocab]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of `f32[batch, seq, vocab]` against `i64[batch, seq]`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def counting_batches(count: int, batch: int, seq: int, vocab: int, seed: int = 0) -> list[torch.Tensor]:
    """Batches of sequences that count up from a random token, `i64[batch, seq + 1]`: something a small model learns fast."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(vocab, (count, batch, 1), generator=generator)
    return list((starts + torch.arange(seq + 1)) % vocab)
