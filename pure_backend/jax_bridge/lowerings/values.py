"""Scalars and types inside lowerings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pure_backend.jax_bridge.casts import cast

DEAR = "pure_backend.dear"
"""The name, for `jax.checkpoint`, of what `remat="auto"` keeps because it is dear to compute again."""


COPY = "pure_backend.copy"
"""The name of what every residual policy keeps: a copy that the user makes of memory that may change before the backward."""


def as_array(value: Any, dtype: Any) -> jax.Array:
    """An array of a dtype from an array or a Python scalar, which wraps as in torch instead of overflowing."""
    if isinstance(value, jax.Array):
        return cast(value, dtype)
    return jnp.asarray(_constant(value, dtype))


def _constant(value: Any, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(value).astype(dtype)


def is_number(value: Any, number: float) -> bool:
    """Whether a scalar argument is this number; of one that arrives at run time nothing is known."""
    return isinstance(value, (int, float)) and value == number


def wide_dtype(dtype: Any) -> Any:
    """The dtype that torch's kernels compute in: f32 for 16-bit floats."""
    return jnp.dtype(jnp.float32) if dtype in (jnp.bfloat16, jnp.float16) else dtype


def wide(x: jax.Array) -> jax.Array:
    """16-bit floats as f32: torch's kernels compute in f32 and round once at the end."""
    return x.astype(wide_dtype(x.dtype))


def keeps_f32(value: Any, dtype: Any) -> bool:
    """Whether an operand of a product or quotient of 16-bit floats is a scalar that torch does not round to 16 bits before."""
    if wide_dtype(dtype) == dtype:
        return False
    if isinstance(value, jax.Array):
        return value.ndim == 0 and value.dtype != dtype
    return float(_constant(value, dtype)) != value


def in_f32(value: Any, dtype: Any) -> jax.Array:
    """The f32 operand of a product or quotient of 16-bit floats: a scalar as it is, a tensor as its 16-bit values."""
    return as_array(value, jnp.float32) if keeps_f32(value, dtype) else as_array(value, dtype).astype(jnp.float32)


def with_tangent(value: Callable[..., Any], tangent: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one array with a derivative of its own: `tangent(x, t)` is linear in `t`, the change of `x`."""
    apply = jax.custom_jvp(value)
    apply.defjvp(lambda primals, tangents: (apply(*primals), tangent(*primals, *tangents)))
    return lambda x: (apply if jnp.issubdtype(x.dtype, jnp.inexact) else value)(x)


_real_magnitude = with_tangent(jnp.abs, lambda x, t: t * sgn(x))


def magnitude(x: jax.Array) -> jax.Array:
    """The absolute value, whose gradient at 0 and NaN is 0 as in torch."""
    return jnp.abs(x) if jnp.iscomplexobj(x) else _real_magnitude(x)


_real_angle = with_tangent(
    lambda x: jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.asarray(np.pi, x.dtype), 0)), lambda x, t: jnp.zeros_like(t)
)


def angle(x: jax.Array) -> jax.Array:
    """The angle of complex numbers, and 0 or pi for real ones; its gradient at 0 is 0."""
    if not jnp.iscomplexobj(x):
        return _real_angle(x)
    zero = x == 0
    return jnp.where(zero, jax.lax.stop_gradient(jnp.angle(x)), jnp.angle(jnp.where(zero, 1, x)))


def sgn(x: jax.Array) -> jax.Array:
    """The sign; of complex numbers the direction, which has a gradient. The sign of NaN is 0, as in torch."""
    if x.dtype == jnp.bool_:
        return x
    if not jnp.iscomplexobj(x):
        return jnp.where(jnp.isnan(x), 0, jnp.sign(x))
    zero = x == 0
    return jnp.where(zero, 0, x / jnp.abs(jnp.where(zero, 1, x)))


def real_dtype(dtype: Any) -> Any:
    """The dtype of the parts of a complex dtype, or the dtype itself."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(x: jax.Array, axis: int) -> jax.Array:
    """Softmax. Its gradient reads nothing but its values: where they are kept, the scores, which are as large, are not."""
    return _softmax(x, axis)


@softmax.defjvp
def _(axis, primals, tangents):
    weights = checkpoint_name(_softmax(primals[0], axis), DEAR)
    moved = weights * tangents[0]
    return weights, moved - weights * moved.sum(axis, keepdims=True)


def _softmax(x: jax.Array, axis: int) -> jax.Array:
    top = jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(x - top)
    return weights / weights.sum(axis, keepdims=True)


@jax.custom_jvp
def keep_gradient_of(new: jax.Array, old: jax.Array) -> jax.Array:
    """The value of `new` with the gradient of `old`."""
    return new


@keep_gradient_of.defjvp
def _keep_gradient_jvp(primals, tangents):
    return primals[0], tangents[1]


def axes(dim: Any, ndim: int) -> tuple[int, ...] | None:
    """Torch's `dim` argument (None, int, list, empty list: all) as non-negative axes; None for all."""
    if dim is None or (isinstance(dim, (tuple, list)) and len(dim) == 0):
        return None
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % ndim if ndim else 0 for d in dims) if ndim else ()
