"""Blocks of queries and keys: how many there are, which of them meet, and what of a block's scores counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pure_backend.custom_ops.tiles import contract, round_up

MASKED = -1e30  # finite: the difference of two masked scores is no NaN
_BLOCKS = (512, 256, 128)  # large blocks read keys less often; 512 x 512 scores in f32 are 1 MiB of VMEM


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of one call.

    Attributes:
        group: How many heads of queries share one of keys.
        q_len: Queries, without padding.
        k_len: Keys, without padding.
        block_q: Queries of a block.
        block_k: Keys of a block.
        causal: Whether query i sees keys 0 to i only.
        scale: Of the scores.
    """

    group: int
    q_len: int
    k_len: int
    block_q: int
    block_k: int
    causal: bool
    scale: float

    @classmethod
    def of(cls, q: Any, k: Any, causal: bool, scale: float) -> Blocks:
        """The blocks for `[batch, heads, q_len, dim]` and `[batch, kv_heads, k_len, dim]`."""
        q_len, k_len = q.shape[2], k.shape[2]
        return cls(q.shape[1] // k.shape[1], q_len, k_len, _block(q_len), _block(k_len), causal, scale)

    @property
    def q_blocks(self) -> int:
        """Blocks that cover the queries."""
        return pl.cdiv(self.q_len, self.block_q)

    @property
    def k_blocks(self) -> int:
        """Blocks that cover the keys."""
        return pl.cdiv(self.k_len, self.block_k)

    def seen(self, i: Any, j: Any) -> Any:
        """Whether some query of block i sees some key of block j."""
        return (j * self.block_k < (i + 1) * self.block_q) if self.causal else (j >= 0)

    def last_seen(self, i: Any, j: Any) -> Any:
        """Block j of the keys, but none beyond the last that block i sees: what is not used is not fetched."""
        return lax.min(j, lax.div((i + 1) * self.block_q - 1, np.int32(self.block_k))) if self.causal else j

    def first_seeing(self, i: Any, j: Any) -> Any:
        """Block i of the queries, but none before the first that sees block j."""
        first = lax.min(lax.div(j * self.block_k, np.int32(self.block_q)), np.int32(self.q_blocks - 1))
        return lax.max(i, first) if self.causal else i

    def scores(self, q: Any, k: Any, i: Any, j: Any) -> Any:
        """The scores `f32[block_q, block_k]` of block i by block j, masked."""
        scores = contract(q, k, (1, 1)) * self.scale
        column = j * self.block_k + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        keep = column < self.k_len
        if self.causal:
            keep &= column <= i * self.block_q + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        return jnp.where(keep, scores, MASKED)


def _block(length: int) -> int:
    """The block size that pads least; the largest of equals."""
    return min(_BLOCKS, key=lambda block: round_up(length, block))


def padded(x: jax.Array, block: int) -> jax.Array:
    """Zeros up to a whole number of blocks: beyond an array a kernel reads anything, NaN too, and 0 times NaN is no zero."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)))
