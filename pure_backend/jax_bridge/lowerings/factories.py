"""Operators that make tensors from numbers. Which device they name does not matter: a program's values live where it runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import as_array


def _filled(value):
    def lower(site: Site, *args, **kwargs):
        return jnp.full(tuple(site.out.shape), value, site.dtype)

    return lower


lowers("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_strided", "aten::empty_permuted")(
    _filled(0)
)
lowers("new_empty_strided")(_filled(0))
lowers("ones", "ones_like", "new_ones")(_filled(1))


@lowers("new_full")
def new_full(site: Site, like, size, fill_value=None, **kwargs):
    """One value everywhere, in a given shape."""
    return full(site, like, fill_value)


@lowers("full", "full_like")
def full(site: Site, like, fill_value=None, *args, **kwargs):
    """One value everywhere."""
    return jnp.broadcast_to(as_array(fill_value, site.dtype), tuple(site.out.shape))


@lowers("tensor", "as_tensor", "asarray", "new_tensor", "scalar_tensor", "aten::_tensor_constant")
def tensor(site: Site, data, *args, **kwargs):
    """A tensor from numbers, lists of numbers, or lists that hold tensors."""
    if site.node.target == "new_tensor":
        data = args[0]
    if isinstance(data, jax.Array):
        return data.astype(site.dtype)
    leaves = jax.tree.leaves(data)
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        return jnp.stack([as_array(leaf, site.dtype) for leaf in leaves]).reshape(tuple(site.out.shape))
    if isinstance(data, torch.Tensor):
        data = data.numpy()
    return as_array(np.asarray(data).reshape(tuple(site.out.shape)), site.dtype)


@lowers("arange", "range")
def arange(site: Site, *args, **kwargs):
    """Equally spaced numbers; torch's own result has their count."""
    names = ("start", "end", "step")
    args = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    if jnp.issubdtype(site.dtype, jnp.integer):  # torch counts with integers then: a step of 2.5 is one of 2
        start, step = (as_array(v, jnp.int64) for v in (start, step))
        return (start + jnp.arange(site.out.shape[0], dtype=jnp.int64) * step).astype(site.dtype)
    return (start + jnp.arange(site.out.shape[0], dtype=jnp.float64) * step).astype(site.dtype)


@lowers("linspace")
def linspace(site: Site, start, end, steps=None, *args, **kwargs):
    """Numbers from start to end, both included."""
    return jnp.linspace(start, end, site.out.shape[0], dtype=jnp.float64).astype(site.dtype)


@lowers("eye")
def eye(site: Site, n, m=None, **kwargs):
    """The identity matrix."""
    return jnp.eye(*site.out.shape, dtype=site.dtype)


@lowers("aten::tril_indices", "tril_indices")
def tril_indices(site: Site, row, col, offset=0, **kwargs):
    """Indices of the lower triangle."""
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)))


@lowers("aten::triu_indices", "triu_indices")
def triu_indices(site: Site, row, col, offset=0, **kwargs):
    """Indices of the upper triangle."""
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)))


@lowers("F.one_hot", "one_hot")
def one_hot(site: Site, x, num_classes=-1):
    """One-hot rows; the number of classes has to be given."""
    return jax.nn.one_hot(x, site.out.shape[-1], dtype=site.dtype)
