"""Write new keys or values into a cache, in the cache's own memory.

The kernel's result aliases the cache (`input_output_aliases`), and its grid visits only the tiles that change, so a step of
decoding moves one tile a head and not the cache. Rows of a tile are not addressable on their own: a tile is read, merged and
written. The new rows are shifted to the place that they have in their tiles before, which touches only the new rows.
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

from pure_backend.custom_ops.jax_op import jax_op
from pure_backend.custom_ops.tiles import check_rank, check_same_dtype, check_shape, sublanes

_NAME = "pure_backend::kv_cache_update_"
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)
_DIMS = "[batch, heads, seq, dim]"


def kv_cache_update_reference(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """The cache's new value, in plain JAX: `[batch, heads, seq, dim]`, `[batch, heads, n, dim]`, `int[]|int[batch]`."""
    starts = jnp.broadcast_to(position, cache.shape[:1])
    return jax.vmap(lambda c, n, start: lax.dynamic_update_slice_in_dim(c, n, start, axis=1))(cache, new, starts)


@jax_op(_NAME, mutates_args=("cache",))
def kv_cache_update_(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """Write `new` into `cache` at a position of its sequence dimension.

    Args:
        cache: `f32|bf16|i8[batch, heads, seq, dim]`; it is written.
        new: The dtype of the cache, `[batch, heads, n, dim]` with n of at most seq.
        position: `int[]`, or `int[batch]`, one per sequence; where the first new row goes. As in JAX, a position by which the
            rows would not fit is moved until they do.

    Returns:
        The cache's new value; the operator itself returns nothing.

    Raises:
        ValueError: A dtype or a shape does not fit.
    """
    _check(cache, new, position)
    seq, rows = cache.shape[2], new.shape[2]
    # int32 first: a TPU makes 64-bit integers of pairs.
    starts = jnp.broadcast_to(jnp.clip(position.astype(jnp.int32), 0, seq - rows), cache.shape[:1])
    return _update(cache, new, starts)


def _check(cache: jax.Array, new: jax.Array, position: jax.Array) -> None:
    check_rank(_NAME, "cache", cache, 4, _DIMS)
    check_rank(_NAME, "new", new, 4, _DIMS)
    if cache.dtype not in _DTYPES:
        raise ValueError(f"{_NAME}: argument 'cache' is {cache.dtype}, expected float32, bfloat16 or int8: convert it")
    check_same_dtype(_NAME, "cache", cache, "new", new)
    batch, heads, seq, dim = cache.shape
    check_shape(_NAME, "new", new, (batch, heads, new.shape[2], dim), f"its other sizes are those of 'cache', {cache.shape}")
    if new.shape[2] > seq:
        raise ValueError(f"{_NAME}: argument 'new' has {new.shape[2]} rows, the cache {seq}: write the last {seq} of them")
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"{_NAME}: argument 'position' is {position.dtype}: give an integer tensor")
    if position.shape not in ((), (batch,)):
        raise ValueError(
            f"{_NAME}: argument 'position' has shape {position.shape}, expected () or ({batch},), one per sequence"
        )


def _update(cache: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
    batch, heads, seq, dim = cache.shape
    rows = new.shape[2]
    tile = min(seq, sublanes(cache.dtype))
    steps = min(pl.cdiv(seq, tile), pl.cdiv(rows - 1, tile) + 1)  # tiles that rows touch wherever they begin
    aligned = _aligned(new, starts % tile, steps * tile, tile)
    last = pl.cdiv(seq, tile) - 1

    def in_cache(b: Any, step: Any, starts: Any) -> tuple:
        return b, 0, lax.min(lax.div(starts[b], np.int32(tile)) + step, np.int32(last)), 0

    block = pl.BlockSpec((1, heads, tile, dim), in_cache)
    return pl.pallas_call(
        functools.partial(_merge_kernel, rows=rows, tile=tile, last=last),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, steps),
            in_specs=[block, pl.BlockSpec((1, heads, tile, dim), lambda b, step, starts: (b, 0, step, 0))],
            out_specs=block,
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={1: 0},  # counted with the prefetched scalars: the cache
        name="kv_cache_update",
    )(starts, cache, aligned)


def _aligned(new: jax.Array, shifts: jax.Array, size: int, tile: int) -> jax.Array:
    """`[batch, heads, n, dim]` -> `[batch, heads, size, dim]`: the new rows at their places within tiles, anything around.

    The shift of each sequence is made of shifts by powers of two, which XLA fuses into one loop over the rows; a batch of
    `dynamic_update_slice` is a scatter, and on TPU a loop of its own.
    """
    if new.shape[2] == 1:
        return jnp.broadcast_to(new, (*new.shape[:2], size, new.shape[3]))
    rows = jnp.pad(new, ((0, 0), (0, 0), (0, size - new.shape[2]), (0, 0)))
    for bit in (1 << i for i in range((tile - 1).bit_length())):
        moved = jnp.pad(rows, ((0, 0), (0, 0), (bit, 0), (0, 0)))[:, :, :size]
        rows = jnp.where((shifts & bit)[:, None, None, None] != 0, moved, rows)
    return rows


def _merge_kernel(starts_ref: Any, cache_ref: Any, new_ref: Any, out_ref: Any, *, rows: int, tile: int, last: int) -> None:
    start, step = starts_ref[pl.program_id(0)], pl.program_id(1)
    wanted = lax.div(start, np.int32(tile)) + step

    # Beyond the end the same tile comes again, with what the step before has merged in `out_ref`: leave it.
    @pl.when(wanted <= last)
    def _() -> None:
        row = wanted * tile + lax.broadcasted_iota(jnp.int32, cache_ref.shape, 2)
        out_ref[...] = jnp.where((row >= start) & (row < start + rows), new_ref[...], cache_ref[...])


def _forward(cache: jax.Array, new: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
    # `new` without its memory: the backward needs to know how many rows it has.
    return kv_cache_update_.functional._fn(cache, new, position), (new[..., :0], position)


def _backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """The written rows of the cotangent belong to the new ones, the others to the old cache."""
    empty, position = residuals
    rows, (batch, _, seq, _) = empty.shape[2], cotangent.shape
    starts = jnp.broadcast_to(jnp.clip(position, 0, seq - rows), (batch,))
    dnew = jax.vmap(lambda c, start: lax.dynamic_slice_in_dim(c, start, rows, axis=1))(cotangent, starts)
    row, first = jnp.arange(seq)[:, None], starts[:, None, None, None]
    written = (row >= first) & (row < first + rows)
    return jnp.where(written, jnp.zeros_like(cotangent), cotangent), dnew, None


kv_cache_update_.register_vjp(_forward, _backward)
