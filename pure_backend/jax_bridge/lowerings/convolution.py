"""Convolutions and pooling, in torch's `N, C, spatial...` layout."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import wide


def as_tuple(value, n: int) -> tuple[int, ...]:
    """An int or a list of one as `n` numbers."""
    value = (value,) * n if isinstance(value, int) else tuple(value)
    return value * n if len(value) == 1 else value


def _padding(padding, kernel, dilation, n: int):
    if padding == "valid":
        return [(0, 0)] * n
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in as_tuple(padding, n)]


def _convolve(x, weight, stride, padding, dilation, groups, lhs_dilation=None):
    n = weight.ndim - 2
    spatial = "DHW"[3 - n :]
    layout = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    return lax.conv_general_dilated(
        x,
        weight,
        stride,
        padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
    )


def _batched(x, n: int):
    """`x` with a batch dimension, and whether it had none."""
    return (x[None], True) if x.ndim == n + 1 else (x, False)


@lowers("F.conv1d", "F.conv2d", "F.conv3d", "conv1d", "conv2d", "conv3d")
def convolution(site: Site, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolution of `x: f[batch, in, ...]` with `weight: f[out, in / groups, ...]`."""
    n = weight.ndim - 2
    stride, dilation = as_tuple(stride, n), as_tuple(dilation, n)
    x, single = _batched(x.astype(site.dtype), n)
    pads = _padding(padding, weight.shape[2:], dilation, n)
    out = _convolve(x, weight.astype(site.dtype), stride, pads, dilation, groups)
    out = out if bias is None else out + bias.astype(site.dtype).reshape(-1, *(1,) * n)
    return out[0] if single else out


@lowers("F.conv_transpose1d", "F.conv_transpose2d", "F.conv_transpose3d")
@lowers("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(site: Site, x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """The gradient of a convolution as an operator: `weight: f[in, out / groups, ...]`."""
    n = weight.ndim - 2
    stride, padding, dilation = as_tuple(stride, n), as_tuple(padding, n), as_tuple(dilation, n)
    extra = as_tuple(output_padding, n)
    x, single = _batched(x.astype(site.dtype), n)
    kernel = weight.astype(site.dtype)
    kernel = kernel.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(-1, weight.shape[0] // groups, *weight.shape[2:])
    kernel = jnp.flip(kernel, tuple(range(2, kernel.ndim)))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
    out = _convolve(x, kernel, (1,) * n, pads, dilation, groups, lhs_dilation=stride)
    out = out if bias is None else out + bias.astype(site.dtype).reshape(-1, *(1,) * n)
    return out[0] if single else out


@lowers("aten::convolution")
def aten_convolution(site: Site, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """ATen's one convolution."""
    if transposed:
        return conv_transpose(site, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolution(site, x, weight, bias, stride, padding, dilation, groups)


def _windows(x, kernel, stride, padding, dilation, n: int, ceil_mode: bool, out_shape):
    """Window arguments of `lax.reduce_window` that give torch's own output size."""
    kernel, dilation = as_tuple(kernel, n), as_tuple(dilation, n)
    stride = as_tuple(stride, n) if stride else kernel
    pads = []
    for size, k, s, p, d, o in zip(x.shape[-n:], kernel, stride, as_tuple(padding, n), dilation, out_shape[-n:], strict=True):
        needed = (o - 1) * s + d * (k - 1) + 1
        pads.append((p, max(needed - size - p, 0)))
    lead = x.ndim - n
    return {
        "window_dimensions": (1,) * lead + kernel,
        "window_strides": (1,) * lead + stride,
        "padding": [(0, 0)] * lead + pads,
        "window_dilation": (1,) * lead + dilation,
    }


@lowers("F.max_pool1d", "F.max_pool2d", "F.max_pool3d", "max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(site: Site, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """Largest value of each window."""
    if return_indices:
        return NotImplemented
    n = _pooled_dims(site, kernel_size)
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    args = _windows(x, kernel_size, stride, padding, dilation, n, ceil_mode, site.out.shape)
    return lax.reduce_window(x, np.asarray(lowest, x.dtype)[()], lax.max, **args)


def _pooled_dims(site: Site, kernel) -> int:
    name = getattr(site.node.target, "__name__", "")
    for n in (1, 2, 3):
        if f"{n}d" in name:
            return n
    return len(kernel)


@lowers("F.avg_pool1d", "F.avg_pool2d", "F.avg_pool3d", "avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d")
def avg_pool(
    site: Site, x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
):
    """Mean of each window."""
    x, n = wide(x), _pooled_dims(site, kernel_size)
    padding = as_tuple(padding, n)
    args = _windows(x, kernel_size, stride, padding, 1, n, ceil_mode, site.out.shape)
    total = lax.reduce_window(x, np.zeros((), x.dtype)[()], lax.add, **args)
    if divisor_override:
        return total / divisor_override
    return total / _window_sizes(x, args, padding, n, count_include_pad)


def _window_sizes(x, args, padding, n: int, count_include_pad: bool):
    """How many elements each window divides by: those inside the input, with the declared padding counted or not."""
    shape = x.shape[-n:]
    pads = args["padding"][-n:]
    ones = jnp.ones(shape, x.dtype)
    if count_include_pad:
        ones = jnp.pad(ones, [(p, p) for p in padding], constant_values=1)
        pads = [(0, max(high - p, 0)) for (_, high), p in zip(pads, padding, strict=True)]
    return lax.reduce_window(
        ones,
        np.zeros((), x.dtype)[()],
        lax.add,
        window_dimensions=args["window_dimensions"][-n:],
        window_strides=args["window_strides"][-n:],
        padding=pads,
    )


@lowers("F.adaptive_avg_pool1d", "F.adaptive_avg_pool2d", "F.adaptive_avg_pool3d", "adaptive_avg_pool1d")
@lowers("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", "aten::adaptive_avg_pool1d")
def adaptive_avg_pool(site: Site, x, output_size):
    """Mean of windows of (almost) equal size, dimension by dimension."""
    x, n = wide(x), _pooled_dims(site, output_size)
    for dim in range(x.ndim - n, x.ndim):
        size, out = x.shape[dim], site.out.shape[dim]
        if out == 0:
            x = lax.slice_in_dim(x, 0, 0, axis=dim)
        elif out == 1:
            x = jnp.mean(x, dim, keepdims=True)
        elif out and size % out == 0:
            x = x.reshape(*x.shape[:dim], out, size // out, *x.shape[dim + 1 :]).mean(dim + 1)
        else:
            x = _window_means(x, dim, adaptive_windows(size, out))
    return x


def _window_means(x, dim: int, windows: np.ndarray):
    """Means along a dimension of the elements that `windows: int[out, kernel]` names; a product with a matrix of weights would
    let one NaN or infinity into every mean, as zero times it."""
    inside = np.expand_dims(windows >= 0, [i for i in range(x.ndim + 1) if i not in (dim, dim + 1)])
    taken = jnp.take(x, np.maximum(windows, 0), axis=dim)
    return jnp.sum(jnp.where(inside, taken, 0), dim + 1) / np.asarray(inside.sum(dim + 1), x.dtype)


def adaptive_windows(size: int, out: int) -> np.ndarray:
    """Indices `int[out, kernel]` of windows of almost equal size, -1 beyond the end of the smaller ones."""
    starts = np.arange(out) * size // max(out, 1)
    ends = -(-(np.arange(out) + 1) * size // max(out, 1))
    index = starts[:, None] + np.arange(max(ends - starts, default=0))[None]
    return np.where(index < ends[:, None], index, -1)
