"""Causal attention with grouped heads in TPU kernels that never hold the scores of more than a block.

The forward is the online softmax of Milakov and Gimelshein 2018 (https://arxiv.org/abs/1805.02867) over blocks of keys, as in
FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), and so is the backward: probabilities `p` are computed again from
the logarithm of their sums, and with `d = rowsum(do out)`, `ds = p (do v^T - d)`,

    dq = scale ds k        dk = scale ds^T q        dv = p^T do

A group of query heads shares a head of keys and values (https://arxiv.org/abs/2305.13245) by the blocks' index maps alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pure_backend.custom_ops.attention_blocks import MASKED, Blocks, padded
from pure_backend.custom_ops.jax_op import jax_op
from pure_backend.custom_ops.tiles import check_float, check_rank, check_same_dtype, check_shape, contract

_NAME = "pure_backend::flash_attention"
_DIMS = "[batch, heads, seq, dim]"


def flash_attention_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True, scale: float | None = None
) -> jax.Array:
    """What the kernels compute, in plain JAX and in f32: `[batch, heads, seq, dim]`, twice `[batch, kv_heads, kv_seq, dim]`."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


@jax_op(_NAME)
def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True, scale: float | None = None) -> jax.Array:
    """`softmax(scale q k^T) v`, as `torch.nn.functional.scaled_dot_product_attention(enable_gqa=True)`.

    Args:
        q: `f32|bf16[batch, heads, seq, dim]`; any seq (blocks are padded), dim of at most 256.
        k: `[batch, kv_heads, kv_seq, dim]` in the dtype of q; kv_heads divides heads.
        v: As k.
        causal: Whether query i sees keys 0 to i only: torch's `is_causal`, also if kv_seq is not seq.
        scale: Of the scores; `dim ** -0.5` if None.

    Returns:
        The shape and dtype of q.

    Raises:
        ValueError: A dtype or a shape does not fit.
    """
    _check(q, k, v)
    blocks = Blocks.of(q, k, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    return _attention(q, k, v, blocks)


def _check(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(_NAME, name, x, 4, _DIMS)
        check_float(_NAME, name, x)
        check_same_dtype(_NAME, "q", q, name, x)
    batch, heads, _, dim = q.shape
    check_shape(_NAME, "k", k, (batch, k.shape[1], k.shape[2], dim), f"batch and dim are those of 'q', {q.shape}")
    check_shape(_NAME, "v", v, k.shape, "the shape of 'k'")
    if heads % k.shape[1]:
        raise ValueError(
            f"{_NAME}: argument 'q' has {heads} heads, no multiple of the {k.shape[1]} of 'k': repeat heads of 'k'"
        )
    if dim > 256:
        raise ValueError(f"{_NAME}: argument 'q' has dim {dim}, at most 256 fits: use scaled_dot_product_attention")


def _call(kernel: Any, blocks: Blocks, grid: tuple, inputs: Any, in_specs: Any, outs: Any, scratch: Any, products: int) -> Any:
    """A kernel over (batch, head, block, blocks that are summed over); `outs` are pairs of a block and its whole."""
    (batch, heads, *_), dim = inputs[0].shape, inputs[0].shape[3]
    pairs = batch * heads * blocks.q_len * blocks.k_len // (2 if blocks.causal else 1)
    moved = sum(x.nbytes for x in inputs)
    return pl.pallas_call(
        functools.partial(kernel, blocks=blocks),
        grid=grid,
        in_specs=in_specs,
        out_specs=[spec for spec, _ in outs],
        out_shape=[out for _, out in outs],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=2 * products * pairs * dim, transcendentals=pairs, bytes_accessed=moved),
        name=f"flash_attention{kernel.__name__.removesuffix('_kernel')}",
    )(*inputs)


def _by_query(blocks: Blocks, arrays: Any) -> tuple[list[pl.BlockSpec], pl.BlockSpec]:
    """Blocks of arrays that go by queries, and of keys and values, in a grid (batch, head, block of queries, block of keys)."""

    def of_key(b: Any, h: Any, i: Any, j: Any) -> tuple:
        return b, lax.div(h, np.int32(blocks.group)), blocks.last_seen(i, j), 0

    of_q = [pl.BlockSpec((None, None, blocks.block_q, x.shape[3]), lambda b, h, i, j: (b, h, i, 0)) for x in arrays]
    return of_q, pl.BlockSpec((None, None, blocks.block_k, arrays[0].shape[3]), of_key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, blocks: Blocks) -> jax.Array:
    return _forward(q, k, v, blocks)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, blocks: Blocks) -> tuple[jax.Array, Any]:
    wide, dim = padded(q, blocks.block_q), q.shape[3]
    log_sum = jax.ShapeDtypeStruct((*wide.shape[:3], 1), jnp.float32)
    (of_q, of_sum), of_k = _by_query(blocks, [wide, log_sum])
    grid = (*q.shape[:2], blocks.q_blocks, blocks.k_blocks)
    outs = [(of_q, jax.ShapeDtypeStruct(wide.shape, q.dtype)), (of_sum, log_sum)]
    scratch = [(blocks.block_q, size) for size in (1, 1, dim)]
    inputs = wide, padded(k, blocks.block_k), padded(v, blocks.block_k)
    out, log_sums = _call(_forward_kernel, blocks, grid, inputs, [of_q, of_k, of_k], outs, scratch, 2)
    out = out[:, :, : blocks.q_len]
    return out, (q, k, v, out, log_sums[:, :, : blocks.q_len, 0])


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    log_sum_ref: Any,
    max_ref: Any,
    sum_ref: Any,
    total_ref: Any,
    *,
    blocks: Blocks,
) -> None:
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        max_ref[...] = jnp.full(max_ref.shape, MASKED, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    @pl.when(blocks.seen(i, j))
    def _() -> None:
        scores = blocks.scores(q_ref[...], k_ref[...], i, j)
        largest = jnp.maximum(max_ref[...], jnp.max(scores, 1, keepdims=True))
        p, kept = jnp.exp(scores - largest), jnp.exp(max_ref[...] - largest)
        sum_ref[...] = kept * sum_ref[...] + jnp.sum(p, 1, keepdims=True)
        total_ref[...] = kept * total_ref[...] + contract(p.astype(v_ref.dtype), v_ref[...], (1, 0))
        max_ref[...] = largest

    @pl.when(j == blocks.k_blocks - 1)
    def _() -> None:
        out_ref[...] = (total_ref[...] / sum_ref[...]).astype(out_ref.dtype)
        log_sum_ref[...] = max_ref[...] + jnp.log(sum_ref[...])


def _backward(blocks: Blocks, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, log_sums = residuals
    sums = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), -1, keepdims=True)
    by_query = [padded(x, blocks.block_q) for x in (q, cotangent, log_sums[..., None], sums)]
    by_key = [padded(x, blocks.block_k) for x in (k, v)]
    of_q, of_k = _by_query(blocks, by_query)
    grid = (*q.shape[:2], blocks.q_blocks, blocks.k_blocks)
    outs, scratch = [(of_q[0], jax.ShapeDtypeStruct(by_query[0].shape, q.dtype))], [(blocks.block_q, q.shape[3])]
    (dq,) = _call(_dq_kernel, blocks, grid, (*by_query, *by_key), [*of_q, of_k, of_k], outs, scratch, 3)
    dk, dv = _key_gradients(blocks, by_query, by_key)
    return dq[:, :, : blocks.q_len], dk[:, :, : blocks.k_len], dv[:, :, : blocks.k_len]


_attention.defvjp(_forward, _backward)


def _key_gradients(blocks: Blocks, by_query: list[jax.Array], by_key: list[jax.Array]) -> list[jax.Array]:
    """The queries that a block of keys meets are those of all heads of its group, one after the other."""
    (batch, kv_heads, _, dim), q_blocks = by_key[0].shape, np.int32(blocks.q_blocks)

    def of_query(b: Any, h: Any, j: Any, step: Any) -> tuple:
        return b, h * blocks.group + lax.div(step, q_blocks), blocks.first_seeing(lax.rem(step, q_blocks), j), 0

    of_q = [pl.BlockSpec((None, None, blocks.block_q, x.shape[3]), of_query) for x in by_query]
    of_k = pl.BlockSpec((None, None, blocks.block_k, dim), lambda b, h, j, step: (b, h, j, 0))
    grid = (batch, kv_heads, blocks.k_blocks, blocks.group * blocks.q_blocks)
    outs = [(of_k, jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in by_key]
    scratch = [(blocks.block_k, dim)] * 2
    return _call(_dkv_kernel, blocks, grid, (*by_query, *by_key), [*of_q, of_k, of_k], outs, scratch, 4)


def _score_gradients(blocks: Blocks, refs: tuple, i: Any, j: Any) -> tuple[Any, Any]:
    """The probabilities of a block and the gradient of its scores."""
    q_ref, cotangent_ref, log_sum_ref, sum_ref, k_ref, v_ref = refs
    p = jnp.exp(blocks.scores(q_ref[...], k_ref[...], i, j) - log_sum_ref[...])
    return p, p * (contract(cotangent_ref[...], v_ref[...], (1, 1)) - sum_ref[...]) * blocks.scale


def _dq_kernel(*refs: Any, blocks: Blocks) -> None:
    *inputs, dq_ref, total_ref = refs
    k_ref, i, j = inputs[4], pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    @pl.when(blocks.seen(i, j))
    def _() -> None:
        _, ds = _score_gradients(blocks, tuple(inputs), i, j)
        total_ref[...] += contract(ds.astype(k_ref.dtype), k_ref[...], (1, 0))

    @pl.when(j == blocks.k_blocks - 1)
    def _() -> None:
        dq_ref[...] = total_ref[...].astype(dq_ref.dtype)


def _dkv_kernel(*refs: Any, blocks: Blocks) -> None:
    *inputs, dk_ref, dv_ref, dk_total_ref, dv_total_ref = refs
    q_ref, cotangent_ref = inputs[:2]
    j, step = pl.program_id(2), pl.program_id(3)
    i = lax.rem(step, np.int32(blocks.q_blocks))

    @pl.when(step == 0)
    def _() -> None:
        dk_total_ref[...] = jnp.zeros(dk_total_ref.shape, jnp.float32)
        dv_total_ref[...] = jnp.zeros(dv_total_ref.shape, jnp.float32)

    @pl.when(blocks.seen(i, j))
    def _() -> None:
        p, ds = _score_gradients(blocks, tuple(inputs), i, j)
        dv_total_ref[...] += contract(p.astype(cotangent_ref.dtype), cotangent_ref[...], (0, 0))
        dk_total_ref[...] += contract(ds.astype(q_ref.dtype), q_ref[...], (0, 0))

    @pl.when(step == blocks.group * blocks.q_blocks - 1)
    def _() -> None:
        dk_ref[...] = dk_total_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_total_ref[...].astype(dv_ref.dtype)
