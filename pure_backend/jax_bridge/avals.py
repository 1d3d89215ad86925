"""Types on both sides: torch dtype <-> JAX dtype, fake tensor -> `jax.ShapeDtypeStruct`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

_PAIRS = (
    (torch.float32, jnp.float32),
    (torch.float64, jnp.float64),
    (torch.float16, jnp.float16),
    (torch.bfloat16, jnp.bfloat16),
    (torch.complex64, jnp.complex64),
    (torch.complex128, jnp.complex128),
    (torch.int8, jnp.int8),
    (torch.int16, jnp.int16),
    (torch.int32, jnp.int32),
    (torch.int64, jnp.int64),
    (torch.uint8, jnp.uint8),
    (torch.uint16, jnp.uint16),
    (torch.uint32, jnp.uint32),
    (torch.uint64, jnp.uint64),
    (torch.bool, jnp.bool_),
    (torch.float8_e4m3fn, jnp.float8_e4m3fn),
    (torch.float8_e5m2, jnp.float8_e5m2),
)
_TO_JAX = {t: jnp.dtype(j) for t, j in _PAIRS}
_TO_TORCH = {jnp.dtype(j): t for t, j in _PAIRS}


def supported_dtype(dtype: torch.dtype) -> bool:
    """Whether JAX has a counterpart of a torch dtype."""
    return dtype in _TO_JAX


def to_jax_dtype(dtype: torch.dtype) -> jnp.dtype:
    """The JAX dtype of a torch dtype.

    Raises:
        KeyError: A quantized or otherwise unsupported dtype; see `supported_dtype`.
    """
    return _TO_JAX[dtype]


def to_torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a JAX dtype."""
    return _TO_TORCH[jnp.dtype(dtype)]


def to_aval(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """The abstract value of a (fake) tensor; call it under `_compat.x64()` so that 64-bit types stay."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), to_jax_dtype(tensor.dtype))


def is_differentiable(dtype: torch.dtype) -> bool:
    """Whether values of a dtype can carry a gradient."""
    return dtype.is_floating_point or dtype.is_complex
