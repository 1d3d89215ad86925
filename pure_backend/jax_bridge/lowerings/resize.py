"""Resizing of images: each output is a weighted sum of few inputs, one dimension after the other.

Floats are gathered and not multiplied by a matrix of weights, in which one NaN or infinity would reach every output.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import wide


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray, a: float = -0.5) -> np.ndarray:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _step(size: int, out: int, align_corners: bool, factor: float | None) -> float:
    """How far apart the inputs of two neighbouring outputs are."""
    corners = (size - 1) / (out - 1) if out > 1 else 0.0
    return corners if align_corners else 1 / factor if factor else size / out


def _weights(
    size: int, out: int, align_corners: bool, factor: float | None, kernel, reach: int
) -> tuple[np.ndarray, np.ndarray]:
    """`f[out, size]` and `bool[out, size]`: what each output takes of each input, as torch's `_compute_indices_weights_aa`, and
    which inputs it reads, some of them with weight 0."""
    step = _step(size, out, align_corners, factor)
    stretch = max(step, 1.0)
    matrix, read = np.zeros((out, size)), np.zeros((out, size), bool)
    for i in range(out):
        center = step * (i + 0.5)
        first = max(int(center - reach * stretch + 0.5), 0)
        end = min(int(center + reach * stretch + 0.5), size)
        taps = kernel((np.arange(first, end) - center + 0.5) / stretch)
        read[i, first:end] = True
        matrix[i, first:end] = taps / taps.sum() if taps.sum() else taps
    return matrix, read


def _resized(kernel, reach: int):
    def lower(site: Site, x, output_size, align_corners, scales_h=None, scales_w=None):
        work = wide(x)
        apply = _products if jnp.issubdtype(x.dtype, jnp.floating) else _fixed_point
        factors = scales_h if isinstance(scales_h, (tuple, list)) else (scales_h, scales_w)
        for dim, factor in zip((-1, -2), reversed(factors), strict=True):
            if x.shape[dim] != site.out.shape[dim] or jnp.issubdtype(x.dtype, jnp.floating):
                taps = _weights(x.shape[dim], site.out.shape[dim], align_corners, factor, kernel, reach)
                work = jnp.moveaxis(apply(jnp.moveaxis(work, dim, -1), *taps), -1, dim)
        return work

    return lower


def _products(x, matrix: np.ndarray, read: np.ndarray):
    """Sums of weights times what is read."""
    rows = [np.flatnonzero(row) for row in read]
    width = max((len(row) for row in rows), default=0)
    places = np.array([np.pad(row, (0, width - len(row)), constant_values=-1) for row in rows]).reshape(-1, width)
    return _weighted(x, x.ndim - 1, places, np.take_along_axis(matrix, np.maximum(places, 0), 1))


def _weighted(x, dim: int, places: np.ndarray, weights: np.ndarray):
    """Sums along a dimension of `places: int[out, taps]`, -1 for none, times their weights."""
    shape = [1] * (x.ndim + 1)
    shape[dim : dim + 2] = places.shape
    terms = jnp.take(x, np.maximum(places, 0), axis=dim) * jnp.asarray(weights.reshape(shape), x.dtype)
    return jnp.sum(jnp.where(places.reshape(shape) >= 0, terms, 0), dim + 1)


def _linear_taps(size: int, out: int, step: float, align_corners: bool, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The two inputs around each output and their weights, computed in f32, and for bytes in f64, as torch does."""
    place = np.arange(out, dtype=dtype)
    stride, half = dtype(step), dtype(0.5)
    source = stride * place if align_corners else np.maximum(stride * (place + half) - half, 0)
    first = np.minimum(source.astype(np.int64), size - 1)
    right = np.clip(source - first.astype(dtype), 0, 1)
    return np.stack([first, np.minimum(first + 1, size - 1)], 1), np.stack([1 - right, right], 1)


@lowers("aten::upsample_linear1d.default", "aten::upsample_bilinear2d.default", "aten::upsample_trilinear3d.default")
def upsample_linear(site: Site, x, output_size, align_corners, *scales):
    """Linear interpolation between the two nearest inputs of each dimension."""
    work, n = wide(x), len(output_size)
    scales = scales or (None,) * n
    if x.dtype == jnp.uint8 and n == 2:
        return _resized_bytes(site, x, align_corners, scales)
    if not jnp.issubdtype(work.dtype, jnp.floating):
        return NotImplemented
    for dim, factor in zip(reversed(range(x.ndim - n, x.ndim)), reversed(scales), strict=True):
        size, out = x.shape[dim], site.out.shape[dim]
        work = _weighted(work, dim, *_linear_taps(size, out, _step(size, out, align_corners, factor), align_corners))
    return work


def _resized_bytes(site: Site, x, align_corners: bool, scales):
    """Two inputs for each output, in fixed point; a dimension of the same size is left as it is."""
    for dim, factor in zip((-1, -2), reversed(scales), strict=True):
        size, out = x.shape[dim], site.out.shape[dim]
        if size != out:
            taps = _linear_taps(size, out, _step(size, out, align_corners, factor), align_corners, np.float64)
            x = jnp.moveaxis(_fixed_point(jnp.moveaxis(x, dim, -1), _matrix(size, *taps)), -1, dim)
    return x


def _matrix(size: int, places: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`f[out, size]`: the weights of each output's inputs, added where one stands there twice."""
    matrix = np.zeros((len(places), size))
    np.add.at(matrix, (np.arange(len(places))[:, None], places), weights)
    return matrix


def _fixed_point(x, matrix: np.ndarray, read: np.ndarray | None = None):
    """Bytes times weights of 16 bits, of which as many as possible lie behind the point, rounded; as torch's kernels do."""
    bits = next(n for n in range(22, -1, -1) if int(0.5 + matrix.max() * (1 << n)) < 1 << 15)
    weights = np.trunc(matrix * (1 << bits) + np.copysign(0.5, matrix)).astype(np.int32)
    total = x.astype(jnp.int32) @ jnp.asarray(weights.T) + (1 << (bits - 1))
    return jnp.clip(total >> bits, 0, 255).astype(x.dtype)


lowers("aten::_upsample_bilinear2d_aa")(_resized(_triangle, 1))
lowers("aten::_upsample_bicubic2d_aa")(_resized(_cubic, 2))
