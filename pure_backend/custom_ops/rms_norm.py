"""RMS normalization (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467) as a TPU kernel with its gradient.

With `r = 1 / sqrt(mean(x^2) + eps)` and `n = x r`, the result is `n weight`. Its cotangent `c` gives, with `g = c weight`,

    dx = r (g - n mean(g n))        dweight = sum over rows of c n

Everything is computed in f32, whatever the dtype of x. The backward computes `r` again: one reduction of a row that it has to
read anyway, against a residual of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pure_backend.custom_ops.jax_op import jax_op
from pure_backend.custom_ops.tiles import check_float, check_shape, row_block

_NAME = "pure_backend::rms_norm"
_BLOCK_BYTES = 2**19  # of f32: with two buffers each for x, cotangent and dx a quarter of a v5e's 16 MiB of scoped VMEM
_MAX_SIZE = 2**15


def rms_norm_reference(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """What the kernel computes, in plain JAX: `[..., size]`, `[size]` -> `[..., size]` in the dtype of x."""
    wide = x.astype(jnp.float32)
    normalized = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (normalized * weight.astype(jnp.float32)).astype(x.dtype)


@jax_op(_NAME)
def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Scale the rows of x to a root mean square of one, then by weight.

    Args:
        x: `f32|bf16[..., size]`, any number of rows.
        weight: `f32|bf16[size]`.
        eps: Added to the mean square.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: A dtype or a shape does not fit, or size is over 32,768.
    """
    check_float(_NAME, "x", x)
    check_float(_NAME, "weight", weight)
    check_shape(_NAME, "weight", weight, x.shape[-1:] or (1,), "one weight for each value in the last dimension of 'x'")
    if not 0 < x.shape[-1] <= _MAX_SIZE:
        raise ValueError(
            f"{_NAME}: the last dimension of argument 'x' is {x.shape[-1]}; a row of 1 to {_MAX_SIZE:,} values fits the memory "
            "of a TPU core: use torch.nn.functional.rms_norm"
        )
    if not x.size:  # no rows: nothing for a grid to visit
        return rms_norm_reference(x, weight, eps)
    return _normalized(x.reshape(-1, x.shape[-1]), weight[None], eps).reshape(x.shape)


def _normalize(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`[rows, size]`, `[1, size]` -> `[rows, size]`."""
    rows, whole, grid = _blocks(x)
    return pl.pallas_call(
        functools.partial(_forward_kernel, eps=eps),
        grid=grid,
        in_specs=[rows, whole],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(flops=4 * x.size, bytes_accessed=2 * x.nbytes, transcendentals=x.shape[0]),
        name="rms_norm",
    )(x, weight)


_normalized = jax.custom_vjp(_normalize, nondiff_argnums=(2,))


def _forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, Any]:
    # Not `_normalized`: a residual policy that keeps the results of kernels sees those of the forward itself only.
    return _normalize(x, weight, eps), (x, weight)


def _backward(eps: float, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    rows, whole, grid = _blocks(x)
    dx, dweight = pl.pallas_call(
        functools.partial(_backward_kernel, eps=eps, rows=x.shape[0]),
        grid=grid,
        in_specs=[rows, whole, rows],
        out_specs=[rows, whole],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(weight.shape, jnp.float32)],
        cost_estimate=pl.CostEstimate(flops=12 * x.size, bytes_accessed=3 * x.nbytes, transcendentals=x.shape[0]),
        name="rms_norm_backward",
    )(x, weight, cotangent)
    return dx, dweight.astype(weight.dtype)


_normalized.defvjp(_forward, _backward)


def _blocks(x: jax.Array) -> tuple[pl.BlockSpec, pl.BlockSpec, tuple[int]]:
    """Blocks of rows, the whole weight, and the grid. The last block may reach beyond x: what is read there goes nowhere."""
    rows, size = x.shape
    block = row_block(rows, 4 * size, x.dtype, _BLOCK_BYTES)
    return pl.BlockSpec((block, size), lambda i: (i, 0)), pl.BlockSpec((1, size), lambda i: (0, 0)), (pl.cdiv(rows, block),)


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    return lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def _forward_kernel(x_ref: Any, weight_ref: Any, y_ref: Any, *, eps: float) -> None:
    x = x_ref[...].astype(jnp.float32)
    y_ref[...] = (x * _inverse_rms(x, eps) * weight_ref[...].astype(jnp.float32)).astype(y_ref.dtype)


def _backward_kernel(
    x_ref: Any, weight_ref: Any, cotangent_ref: Any, dx_ref: Any, dweight_ref: Any, *, eps: float, rows: int
) -> None:
    x, cotangent = x_ref[...].astype(jnp.float32), cotangent_ref[...].astype(jnp.float32)
    inverse = _inverse_rms(x, eps)
    normalized, scaled = x * inverse, cotangent * weight_ref[...].astype(jnp.float32)
    dx = inverse * (scaled - normalized * jnp.mean(scaled * normalized, -1, keepdims=True))
    dx_ref[...] = dx.astype(dx_ref.dtype)

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        dweight_ref[...] = jnp.zeros(dweight_ref.shape, jnp.float32)

    # The rows beyond x hold anything, NaN too, and must not reach the sum.
    row = pl.program_id(0) * x.shape[0] + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    dweight_ref[...] += jnp.sum(jnp.where(row < rows, cotangent * normalized, 0.0), 0, keepdims=True)
