"""Pooling that knows where its maxima were: windows are gathered, the first largest element (or last NaN) of each is taken."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pure_backend.jax_bridge.lowerings.convolution import adaptive_windows, as_tuple
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, names_of
from pure_backend.jax_bridge.lowerings.values import keep_gradient_of


def _sliding(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> np.ndarray:
    """Indices of `int[out, kernel]` into one dimension, -1 where a window reaches over its ends."""
    index = np.arange(out)[:, None] * stride - padding + np.arange(kernel)[None] * dilation
    return np.where((index >= 0) & (index < size), index, -1)


def _largest(x: jax.Array, windows: list[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Values and places (in the flattened last dimensions) of the first largest element of each window."""
    n = len(windows)
    lead, sizes = x.shape[: x.ndim - n], x.shape[x.ndim - n :]
    grids = [_spread(w, dim, n) for dim, w in enumerate(windows)]  # each int[out..., kernel...], broadcast
    inside = np.broadcast_arrays(*grids)
    valid = np.all([g >= 0 for g in inside], axis=0)
    flat = np.ravel_multi_index([np.maximum(g, 0) for g in inside], sizes) if math.prod(sizes) else np.zeros(valid.shape, int)
    outs, kernels = valid.shape[:n], math.prod(valid.shape[n:])
    flat, valid = jnp.asarray(flat.reshape(*outs, kernels)), jnp.asarray(valid.reshape(*outs, kernels))
    gathered = x.reshape(*lead, -1)[..., flat]
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    ranked = jnp.where(valid, gathered, jnp.asarray(lowest, x.dtype))
    first = _place_of_largest(ranked)
    places = jnp.take_along_axis(jnp.broadcast_to(flat, ranked.shape), first, axis=-1)[..., 0]
    return jnp.take_along_axis(gathered, first, axis=-1)[..., 0], places


def _place_of_largest(ranked):
    """The place of the first largest element, or of the last NaN: torch's loop takes every NaN that it meets."""
    first = jnp.argmax(ranked, axis=-1, keepdims=True)
    if not jnp.issubdtype(ranked.dtype, jnp.floating):
        return first
    nan = jnp.isnan(ranked)
    last = ranked.shape[-1] - 1 - jnp.argmax(nan[..., ::-1], axis=-1, keepdims=True)
    return jnp.where(nan.any(-1, keepdims=True), last, first)


def _spread(windows: np.ndarray, dim: int, n: int) -> np.ndarray:
    shape = [1] * (2 * n)
    shape[dim], shape[n + dim] = windows.shape
    return windows.reshape(shape)


@lowers("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices", "max_pool1d_with_indices")
@lowers("F.max_pool1d_with_indices", "F.max_pool2d_with_indices", "F.max_pool3d_with_indices")
def max_pool_with_indices(site: Site, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=True):
    """`(largest values, their places)` of sliding windows."""
    n = _pooled(site)
    kernel = as_tuple(kernel_size, n)
    stride = kernel if stride is None or stride == [] else as_tuple(stride, n)
    outs = site.out[0].shape[-n:]
    each = zip(x.shape[-n:], outs, kernel, stride, as_tuple(padding, n), as_tuple(dilation, n), strict=True)
    return _largest(x, [_sliding(*window) for window in each])


@lowers("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d", "adaptive_max_pool1d")
def adaptive_max_pool(site: Site, x, output_size):
    """`(largest values, their places)` of windows of almost equal size."""
    n = _pooled(site)
    return _largest(x, [adaptive_windows(size, out) for size, out in zip(x.shape[-n:], site.out[0].shape[-n:], strict=True)])


@lowers("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward")
def max_pool_backward(site: Site, grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices):
    """The cotangents, added where the largest elements were."""
    return _at_places(jnp.zeros_like(x), indices, grad, _pooled(site), "add")


@lowers("aten::max_unpool2d", "aten::max_unpool3d")
def max_unpool(site: Site, x, indices, output_size, stride=None, padding=None):
    """Values put back to the places that pooling took them from, zero elsewhere; each has the gradient of its place."""
    zeros = jnp.zeros(tuple(site.out.shape), x.dtype)
    last, all_of_them = (_at_places(zeros, indices, x, _pooled(site), how) for how in ("set", "add"))
    return keep_gradient_of(last, all_of_them)


def _pooled(site: Site) -> int:
    """How many dimensions an operator pools over, as its name says."""
    name = names_of(site.node.target)[0]
    return next(n for n in (1, 2, 3) if f"{n}d" in name)


def _at_places(target, indices, values, n: int, how: str):
    lead = target.shape[: target.ndim - n]
    flat = target.reshape(math.prod(lead), -1)
    rows = jnp.arange(flat.shape[0])[:, None]
    places, values = indices.reshape(flat.shape[0], -1), values.reshape(flat.shape[0], -1)
    return getattr(flat.at[rows, places], how)(values).reshape(target.shape)
