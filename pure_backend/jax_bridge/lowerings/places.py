"""Reading and writing at index arrays: one rule for an index out of range, which reads NaN and writes nothing.

In eager it is an error, which a program cannot raise. Of integers it reads the smallest, of unsigned ones the largest number.
"""

from __future__ import annotations

import jax.numpy as jnp


def read(x, index, wraps: bool = False):
    """`x[index]`; with `wraps` negative indices count from the end, as in a subscript."""
    return x.at[index].get(mode="fill", wrap_negative_indices=wraps)


def write(x, index, values, how: str = "set", wraps: bool = False):
    """`x` with values combined in at an index; `how` is a method of `x.at[...]`."""
    return getattr(x.at[index], how)(values, mode="drop", wrap_negative_indices=wraps)


def read_along(x, index, axis: int):
    """One element for each of `index` along an axis; the other dimensions of both match."""
    return jnp.take_along_axis(x, jnp.where(index < 0, x.shape[axis], index), axis, mode="fill")
