"""Conversions between dtypes as torch makes them on x86; XLA saturates where torch wraps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pure_backend import _compat


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """An array in another dtype.

    A float that its integer does not hold becomes what x86's instruction gives, the smallest number of 32 or of 64 bits, of
    which a narrower integer keeps the low bits: `-1.0` is 255 in uint8, NaN the smallest int64. A complex number loses its
    imaginary part.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if dtype == jnp.bool_:
        return x != 0
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x.real
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        return _integer(x, dtype)
    if dtype == jnp.float8_e4m3fn:
        return _float8(x)
    return x.astype(dtype)


def _integer(x: jax.Array, dtype: Any) -> jax.Array:
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if dtype == jnp.uint64:  # the upper half apart
        upper = _truncated(x - 2.0**63, np.int64).astype(dtype) ^ np.uint64(2**63)
        return jnp.where(x < 2.0**63, _truncated(x, np.int64).astype(dtype), jnp.where(x >= 2.0**63, upper, np.uint64(2**63)))
    through = np.int32 if dtype.itemsize < 4 or dtype == jnp.int32 else np.int64
    return _truncated(x, through).astype(dtype)


def _truncated(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounded to zero; the smallest number in the place of NaN and of what is out of range."""
    smallest = np.iinfo(dtype).min
    return jnp.where(jnp.abs(x) < -float(smallest), x.astype(dtype), dtype(smallest))


def _float8(x: jax.Array) -> jax.Array:
    """In `float8_e4m3fn`, which has no infinity: what is too large is NaN, or the largest number in newer torch."""
    if not _compat.float8_saturates():
        return x.astype(jnp.float32).astype(jnp.float8_e4m3fn)
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    return jnp.clip(x.astype(jnp.float32), -largest, largest).astype(jnp.float8_e4m3fn)
