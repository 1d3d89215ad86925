"""What the kernels have in common: TPU tiles, checks of arguments, the precision of products.

A TPU keeps the last two dimensions of an array in tiles of 8 x 128 values of 32 bits, 16 x 128 of 16 bits, 32 x 128 of 8 bits
(https://docs.jax.dev/en/latest/pallas/tpu/details.html). A block is a whole number of tiles, or as large as the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

LANES = 128
FLOATS = (jnp.float32, jnp.bfloat16)


def sublanes(dtype: Any) -> int:
    """Rows of a tile."""
    return 32 // jnp.dtype(dtype).itemsize


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def row_block(rows: int, row_bytes: int, dtype: Any, budget: int) -> int:
    """How many rows a block has: all of them, or whole tiles of at most a budget of bytes (one tile at least)."""
    tile = sublanes(dtype)
    return min(rows, max(tile, budget // row_bytes // tile * tile))


def precision(dtype: Any) -> jax.lax.Precision:
    """The precision of a product in a kernel: exact in f32; Mosaic takes bf16 at its own precision only."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def contract(a: Any, b: Any, over: tuple[int, int]) -> Any:
    """The product of two matrices over one dimension of each, in f32."""
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision(a.dtype), preferred_element_type=jnp.float32)


def check_float(op: str, name: str, x: Any) -> None:
    """Whether an argument has a dtype that a TPU computes with.

    Raises:
        ValueError: It is another one.
    """
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: argument {name!r} is {x.dtype}; TPU kernels compute in float32 or bfloat16: convert it")


def check_same_dtype(op: str, first: str, x: Any, second: str, y: Any) -> None:
    """Whether two arguments have one dtype.

    Raises:
        ValueError: They differ.
    """
    if x.dtype != y.dtype:
        raise ValueError(f"{op}: argument {second!r} is {y.dtype}, {first!r} is {x.dtype}: convert one to the other")


def check_shape(op: str, name: str, x: Any, expected: Sequence[int], why: str) -> None:
    """Whether an argument has the shape that the others ask for.

    Raises:
        ValueError: It has another one.
    """
    if tuple(x.shape) != tuple(expected):
        raise ValueError(f"{op}: argument {name!r} has shape {tuple(x.shape)}, expected {tuple(expected)}: {why}")


def check_rank(op: str, name: str, x: Any, rank: int, dims: str) -> None:
    """Whether an argument has so many dimensions, and elements at all.

    Raises:
        ValueError: It has more or fewer, or one of size 0.
    """
    if x.ndim != rank or 0 in x.shape:
        raise ValueError(f"{op}: argument {name!r} has shape {tuple(x.shape)}, expected {dims}, none of them 0")
