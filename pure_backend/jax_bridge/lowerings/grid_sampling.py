"""Sampling of images at the points of a grid, with torch's gradients at their borders and its NaN at points that are none."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import wide, with_tangent

_ZEROS, _BORDER = 0, 1
_LINEAR, _NEAREST, _CUBIC = 0, 1, 2


@lowers("aten::grid_sampler_2d", "aten::grid_sampler_3d")
def grid_sampler(site: Site, image, grid, interpolation_mode, padding_mode, align_corners):
    """`image: f[batch, channels, *sizes]` at `grid: f[batch, *outs, n]`, whose last dimension counts from the last size on."""
    sizes, dtype = image.shape[2:], image.dtype
    image = wide(image)
    points = [wide(grid)[..., -1 - d].reshape(grid.shape[0], -1) for d in range(len(sizes))]
    points = [_place(p, size, align_corners) for p, size in zip(points, sizes, strict=True)]
    if len(sizes) == 3:  # torch's loop over volumes takes what is no number for a place outside
        points = [_numbers(p, size, padding_mode) for p, size in zip(points, sizes, strict=True)]
    taps = {_LINEAR: _linear, _NEAREST: _nearest, _CUBIC: _cubic}[interpolation_mode]
    each = [taps(p, size, padding_mode, align_corners) for p, size in zip(points, sizes, strict=True)]
    total = sum(_at(image, corner, padding_mode) for corner in itertools.product(*each))
    return jnp.asarray(total).reshape(tuple(site.out.shape)).astype(dtype)


def _place(x, size: int, align_corners: bool):
    """Coordinates in [-1, 1] as places among the elements."""
    return (x + 1) * ((size - 1) / 2) if align_corners else (x + 1) * (size / 2) - 0.5


def _numbers(x, size: int, padding: int):
    """Places with those that are none moved outside, or to the last element."""
    return jnp.where(jnp.isnan(x) | (padding == _ZEROS) & jnp.isinf(x), -2 if padding == _ZEROS else size - 1, x)


def _linear(x, size: int, padding: int, align_corners: bool):
    """Two places with their weights."""
    x = _padded(x, size, padding, align_corners)
    first = lax.stop_gradient(jnp.floor(x))
    return [_tap(first, size, 1 - (x - first)), _tap(first + 1, size, x - first)]


def _nearest(x, size: int, padding: int, align_corners: bool):
    """One place, which has no gradient."""
    return [_tap(jnp.round(lax.stop_gradient(_padded(x, size, padding, align_corners))), size, None)]


def _cubic(x, size: int, padding: int, align_corners: bool):
    """Four places, each padded on its own, with Keys's weights."""
    first = lax.stop_gradient(jnp.floor(x))
    weights = _cubic_weights(x - first)
    places = (lax.stop_gradient(_padded(first + i, size, padding, align_corners)) for i in (-1, 0, 1, 2))
    return [_tap(place, size, weight) for place, weight in zip(places, weights, strict=True)]


def _cubic_weights(t, a: float = -0.75):
    def near(x):
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x):
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _tap(place, size: int, weight):
    """A place within the size, whether it was within, and its weight."""
    inside = (place >= 0) & (place <= size - 1)
    return jnp.where(inside, place, 0).astype(jnp.int32), inside, weight, size


def _at(image, corner, padding: int):
    """The weighted elements at one combination of places, zero outside; a weight that is NaN stays one."""
    flat, inside = jnp.int32(0), jnp.bool_(True)
    for place, within, _, size in corner:
        flat, inside = flat * size + place, inside & within
    rows = image.reshape(*image.shape[:2], -1)
    value = jax.vmap(lambda row, index: row[:, index])(rows, flat)
    value = jnp.where(inside[:, None], value, 0)
    for _, _, weight, _ in corner:
        value = value if weight is None else value * weight[:, None]
    return value


def _padded(x, size: int, padding: int, align_corners: bool):
    """Places outside moved to the border, or reflected at it."""
    if padding == _ZEROS:
        return x
    if padding == _BORDER:
        return _clipped(x, size)
    return _clipped(_reflected(x, 0, 2 * (size - 1)) if align_corners else _reflected(x, -1, 2 * size - 1), size)


def _clipped(x, size: int):
    """Limited to the elements; on the border and beyond there is no gradient."""
    limited = with_tangent(
        lambda x: jnp.minimum(jnp.maximum(x, 0), size - 1), lambda x, t: jnp.where((x > 0) & (x < size - 1), t, 0)
    )
    return limited(x)


def _reflected(x, twice_low: int, twice_high: int):
    """Reflected at two borders, given times two, as often as it takes."""
    if twice_low == twice_high:
        return jnp.zeros_like(x)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    x = jnp.where(x - low < 0, low - x, x - low)
    flips = lax.stop_gradient(jnp.floor(x / span))
    rest = x - flips * span
    return jnp.where(flips % 2 == 0, rest + low, span - rest + low)
