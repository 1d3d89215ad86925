"""Resizing of images with a filter as wide as the step: one small matrix for each of the two dimensions."""

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


def _weights(size: int, out: int, align_corners: bool, factor: float | None, kernel, reach: int) -> np.ndarray:
    """`f[out, size]`: what each output takes of each input, as torch's `_compute_indices_weights_aa`."""
    corners = (size - 1) / (out - 1) if out > 1 else 0.0
    step = corners if align_corners else 1 / factor if factor else size / out
    stretch = max(step, 1.0)
    matrix = np.zeros((out, size))
    for i in range(out):
        center = step * (i + 0.5)
        first = max(int(center - reach * stretch + 0.5), 0)
        end = min(int(center + reach * stretch + 0.5), size)
        taps = kernel((np.arange(first, end) - center + 0.5) / stretch)
        matrix[i, first:end] = taps / taps.sum() if taps.sum() else taps
    return matrix


def _resized(kernel, reach: int):
    def lower(site: Site, x, output_size, align_corners, scales_h=None, scales_w=None):
        work = wide(x)
        apply = _products if jnp.issubdtype(x.dtype, jnp.floating) else _fixed_point
        factors = scales_h if isinstance(scales_h, (tuple, list)) else (scales_h, scales_w)
        for dim, factor in zip((-1, -2), reversed(factors), strict=True):
            if x.shape[dim] != site.out.shape[dim] or jnp.issubdtype(x.dtype, jnp.floating):
                matrix = _weights(x.shape[dim], site.out.shape[dim], align_corners, factor, kernel, reach)
                work = jnp.moveaxis(apply(jnp.moveaxis(work, dim, -1), matrix.T), -1, dim)
        return work

    return lower


def _products(x, matrix: np.ndarray):
    return x @ jnp.asarray(matrix, x.dtype)


def _fixed_point(x, matrix: np.ndarray):
    """Bytes times weights of 16 bits, of which as many as possible lie behind the point, rounded; as torch's kernels do."""
    bits = next(n for n in range(22, -1, -1) if int(0.5 + matrix.max() * (1 << n)) < 1 << 15)
    weights = np.trunc(matrix * (1 << bits) + np.copysign(0.5, matrix)).astype(np.int32)
    total = x.astype(jnp.int32) @ jnp.asarray(weights) + (1 << (bits - 1))
    return jnp.clip(total >> bits, 0, 255).astype(x.dtype)


lowers("aten::_upsample_bilinear2d_aa")(_resized(_triangle, 1))
lowers("aten::_upsample_bicubic2d_aa")(_resized(_cubic, 2))
