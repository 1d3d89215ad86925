"""A linear layer with int8 weights, one scale for each output channel.

Weights stay int8 in HBM and on their way to the core, where a block at a time becomes the dtype of x; int8 is exact in bf16. A
column's scale multiplies its sums once, after the last block, which is where Dettmers et al. 2022
(https://arxiv.org/abs/2208.07339) put it. The tiling is that of the matrix product in Pallas's guide
(https://docs.jax.dev/en/latest/pallas/tpu/matmul.html).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pure_backend.custom_ops.jax_op import jax_op
from pure_backend.custom_ops.tiles import LANES, check_float, check_shape, contract, row_block

_NAME = "pure_backend::quantized_matmul"
_BLOCK = 512
_BLOCK_BYTES = 2**20
_MAX_WHOLE = 4096  # a summed dimension that no block divides is taken whole up to here: 2 MiB of int8


def quantized_matmul_reference(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """What the kernel computes, in plain JAX: `[..., in]`, `i8[out, in]`, `f32[out]` -> `[..., out]` in the dtype of x."""
    product = jnp.einsum("...i,oi->...o", x.astype(jnp.float32), weight.astype(jnp.float32))
    return (product * scale).astype(x.dtype)


def quantize_reference(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights in int8: `[out, in]` -> `i8[out, in]`, `f32[out]`, the largest value of each row at 127."""
    scale = jnp.maximum(jnp.max(jnp.abs(weight), 1).astype(jnp.float32) / 127, jnp.finfo(jnp.float32).tiny)
    return jnp.round(weight / scale[:, None]).astype(jnp.int8), scale


@jax_op(_NAME)
def quantized_matmul(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """`x @ (scale * weight).T`, as `torch.nn.functional.linear`; the gradient reaches x and scale.

    Args:
        x: `f32|bf16[..., in]`, any number of rows.
        weight: `i8[out, in]`.
        scale: `f32[out]`.

    Returns:
        `[..., out]` in the dtype of x.

    Raises:
        ValueError: A dtype or a shape does not fit, or in or out is over 4,096 and no multiple of 128.
    """
    _check(x, weight, scale)
    out, size = weight.shape
    if not x.size:  # no rows: nothing for a grid to visit
        return quantized_matmul_reference(x, weight, scale)
    return _product(x.reshape(-1, size), weight, scale[None], 1).reshape(*x.shape[:-1], out)


def _check(x: jax.Array, weight: jax.Array, scale: jax.Array) -> None:
    check_float(_NAME, "x", x)
    if weight.dtype != jnp.int8 or weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"{_NAME}: argument 'weight' is {weight.dtype}{list(weight.shape)}, expected int8[out, in]: quantize it"
        )
    out, size = weight.shape
    check_shape(_NAME, "x", x, (*x.shape[:-1], size), "its last size is the second of 'weight'")
    check_shape(_NAME, "scale", scale, (out,), "one scale for each output channel")
    check_float(_NAME, "scale", scale)
    for name, summed in (("second", size), ("first", out)):  # the forward sums over one, the backward over the other
        if _summed_block(summed) > _MAX_WHOLE:
            raise ValueError(f"{_NAME}: the {name} size of argument 'weight' is {summed}: pad it to a multiple of {LANES}")


def _summed_block(size: int) -> int:
    """A block that divides a summed dimension: beyond it a kernel reads anything, and all of it would be added."""
    return next((block for block in (_BLOCK, 2 * LANES, LANES) if size % block == 0), size)


def _product(x: jax.Array, weight: jax.Array, scale: jax.Array | None, over: int) -> jax.Array:
    """`[rows, in]` by `i8[out, in]` over its dimension 1, or `[rows, out]` over its dimension 0; scaled by `[1, columns]`."""
    rows, summed = x.shape
    columns = weight.shape[1 - over]
    depth, width = _summed_block(summed), min(columns, _BLOCK)
    height = row_block(rows, 4 * max(depth, width), x.dtype, _BLOCK_BYTES)
    place = (lambda i, j, k: (j, k)) if over else (lambda i, j, k: (k, j))
    of_weight = pl.BlockSpec((width, depth) if over else (depth, width), place)
    of_scale = [] if scale is None else [pl.BlockSpec((1, width), lambda i, j, k: (0, j))]
    return pl.pallas_call(
        functools.partial(_kernel, over=over, steps=summed // depth),
        grid=(pl.cdiv(rows, height), pl.cdiv(columns, width), summed // depth),
        in_specs=[pl.BlockSpec((height, depth), lambda i, j, k: (i, k)), of_weight, *of_scale],
        out_specs=pl.BlockSpec((height, width), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        scratch_shapes=[pltpu.VMEM((height, width), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * weight.size, bytes_accessed=x.nbytes + weight.nbytes + rows * columns * 4, transcendentals=0
        ),
        name="quantized_matmul" if over else "quantized_matmul_dx",
    )(x, weight, *([] if scale is None else [scale]))


def _kernel(x_ref: Any, weight_ref: Any, *refs: Any, over: int, steps: int) -> None:
    *scale_ref, out_ref, total_ref = refs

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    total_ref[...] += contract(x_ref[...], weight_ref[...].astype(jnp.float32).astype(x_ref.dtype), (1, over))

    @pl.when(pl.program_id(2) == steps - 1)
    def _() -> None:
        total = total_ref[...]
        for ref in scale_ref:
            total = total * ref[...].astype(jnp.float32)
        out_ref[...] = total.astype(out_ref.dtype)


def _forward(x: jax.Array, weight: jax.Array, scale: jax.Array) -> tuple[jax.Array, Any]:
    return quantized_matmul._fn(x, weight, scale), (x, weight, scale)


def _backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    x, weight, scale = residuals
    rows, cotangents = x.reshape(-1, weight.shape[1]), cotangent.reshape(-1, weight.shape[0])
    scaled = (cotangents.astype(jnp.float32) * scale).astype(x.dtype)
    dx = _product(scaled, weight, None, 0) if x.size else rows
    by_weight = jnp.einsum("ro,ri->oi", cotangents, rows, preferred_element_type=jnp.float32)
    return dx.reshape(x.shape), None, jnp.sum(by_weight * weight, 1)


quantized_matmul.register_vjp(_forward, _backward)
