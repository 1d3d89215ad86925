"""Operators that move elements without changing them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import as_array


@lowers("reshape", "aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "view_as", "reshape_as", "flatten")
@lowers("unflatten", "ravel", "squeeze", "unsqueeze", "atleast_1d", "atleast_2d", "atleast_3d", "expand_dims")
def reshape(site: Site, x, *args, **kwargs):
    """Any operator that keeps elements in order: torch's own result has the shape."""
    return x.reshape(site.out.shape)


@lowers("view")
def view(site: Site, x, *args, **kwargs):
    """A reshape, or with a dtype argument a reading of the same bits as another type."""
    if x.dtype == site.dtype:
        return x.reshape(site.out.shape)
    return bitcast(x, site.dtype).reshape(site.out.shape)


def bitcast(x: jax.Array, dtype) -> jax.Array:
    """The bits of `x` as another dtype; widths may differ in the last dimension, as in torch."""
    old, new = jnp.dtype(x.dtype).itemsize, jnp.dtype(dtype).itemsize
    if old == new:
        return lax.bitcast_convert_type(x, dtype)
    if old > new:
        parts = lax.bitcast_convert_type(x, dtype)
        return parts.reshape(*x.shape[:-1], -1)
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, new // old), dtype)


@lowers("permute", "aten::permute")
def permute(site: Site, x, *dims):
    """Dimensions in another order."""
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return jnp.transpose(x, [d % x.ndim for d in dims])


@lowers("transpose", "swapaxes", "swapdims")
def transpose(site: Site, x, dim0, dim1):
    """Two dimensions exchanged."""
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowers("t", "T", "mT", "adjoint", "H", "mH", "numpy_T")
def t(site: Site, x):
    """Matrix transpose."""
    return x.T if x.ndim < 3 else jnp.swapaxes(x, -1, -2)


@lowers("movedim", "moveaxis")
def movedim(site: Site, x, source, destination):
    """Dimensions moved to other places."""
    return jnp.moveaxis(x, source, destination)


@lowers("expand", "expand_as", "broadcast_to", "aten::expand")
def expand(site: Site, x, *args, **kwargs):
    """Broadcast."""
    return jnp.broadcast_to(x, site.out.shape)


@lowers("prims::broadcast_in_dim")
def broadcast_in_dim(site: Site, x, shape, broadcast_dimensions):
    """XLA's own broadcast, as torch's primitives spell it."""
    return lax.broadcast_in_dim(x, tuple(shape), tuple(broadcast_dimensions))


@lowers("repeat", "tile")
def repeat(site: Site, x, *sizes):
    """Copies along each dimension."""
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return jnp.tile(x, sizes)


@lowers("cat", "concat", "concatenate")
def cat(site: Site, tensors, dim=0, axis=None):
    """Tensors joined; empty 1-D ones are skipped as torch does for old code's sake."""
    dim = axis if axis is not None else dim
    parts = [as_array(x, site.dtype) for x in tensors if x.shape != (0,) or len(site.out.shape) == 1]
    return jnp.concatenate(parts, axis=dim) if parts else jnp.zeros(tuple(site.out.shape), site.dtype)


@lowers("stack")
def stack(site: Site, tensors, dim=0):
    """Tensors joined along a new dimension."""
    return jnp.stack([as_array(x, site.dtype) for x in tensors], axis=dim)


def _pieces(site: Site, x, dim: int) -> tuple[jax.Array, ...]:
    """`x` cut into the sizes of torch's own pieces."""
    pieces, start = [], 0
    for piece in site.out:
        pieces.append(lax.slice_in_dim(x, start, start + piece.shape[dim], axis=dim))
        start += piece.shape[dim]
    return tuple(pieces)


@lowers("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def split(site: Site, x, sizes=None, dim=0, **kwargs):
    """Consecutive pieces."""
    return _pieces(site, x, dim % x.ndim)


@lowers("unbind")
def unbind(site: Site, x, dim=0):
    """One piece an index."""
    return tuple(jnp.squeeze(piece, dim) for piece in jnp.split(x, x.shape[dim], axis=dim)) if x.shape[dim] else ()


@lowers("select")
def select(site: Site, x, dim, index):
    """One index of a dimension."""
    return lax.index_in_dim(x, index % x.shape[dim] if isinstance(index, int) else index, dim, keepdims=False)


@lowers("narrow")
def narrow(site: Site, x, dim, start, length):
    """A piece of a dimension; the start may be a tensor."""
    if isinstance(start, int):
        start = start % x.shape[dim] if start < 0 else start
        return lax.slice_in_dim(x, start, start + length, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, length, axis=dim)


@lowers("aten::slice")
def slice_(site: Site, x, dim=0, start=None, end=None, step=1):
    """A strided piece of a dimension."""
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x[tuple(index)]


@lowers("flip")
def flip(site: Site, x, *dims):
    """Reversed dimensions."""
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return jnp.flip(x, tuple(dims))


@lowers("roll")
def roll(site: Site, x, shifts, dims=None):
    """Cyclic shift."""
    dims = dims if dims not in ((), []) else None
    return jnp.roll(
        x,
        shifts if isinstance(shifts, int) else tuple(shifts),
        dims if dims is None or isinstance(dims, int) else tuple(dims),
    )


@lowers("tril")
def tril(site: Site, x, diagonal=0):
    """The lower triangle."""
    return jnp.tril(x, diagonal)


@lowers("triu")
def triu(site: Site, x, diagonal=0):
    """The upper triangle."""
    return jnp.triu(x, diagonal)


@lowers("diagonal")
def diagonal(site: Site, x, offset=0, dim1=0, dim2=1):
    """The diagonal of two dimensions, as the last dimension."""
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers("F.pad", "aten::constant_pad_nd", "aten::pad")
def pad(site: Site, x, pad, mode="constant", value=None):
    """Padding from the last dimension inwards; negative amounts crop."""
    if not isinstance(mode, str):  # aten.constant_pad_nd(x, pad, value)
        mode, value = "constant", mode
    amounts = [(0, 0)] * (x.ndim - len(pad) // 2)
    amounts += [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    if mode == "constant":
        fill = as_array(0 if value is None else value, x.dtype)
        return lax.pad(x, fill, [(low, high, 0) for low, high in amounts])
    if mode == "circular":
        crop = tuple(slice(max(-low, 0), n - max(-high, 0)) for (low, high), n in zip(amounts, x.shape, strict=True))
        return jnp.pad(x[crop], [(max(low, 0), max(high, 0)) for low, high in amounts], mode="wrap")
    for dim, (low, high) in enumerate(amounts):
        if low or high:
            x = jnp.take(x, _mirrored(x.shape[dim], low, high, mode), axis=dim)
    return x


def _mirrored(size: int, low: int, high: int, mode: str) -> np.ndarray:
    """Where each element of a padded dimension comes from; the ends are those of the whole dimension, even if it is cropped."""
    place = np.arange(-low, size + high)
    if mode == "replicate":
        return np.clip(place, 0, size - 1)
    place = np.abs(place)
    return np.where(place > size - 1, 2 * (size - 1) - place, place)


@lowers("repeat_interleave")
def repeat_interleave(site: Site, x, repeats, dim=None, *, output_size=None):
    """Each element several times in a row."""
    x, dim = (x.reshape(-1), 0) if dim is None else (x, dim)
    size = site.out.shape[dim]
    return jnp.repeat(x, repeats, axis=dim, total_repeat_length=size)


@lowers("unfold")
def unfold(site: Site, x, dimension, size, step):
    """Sliding windows of a dimension, as a new last dimension."""
    if x.ndim == 0:
        return jnp.broadcast_to(x, tuple(site.out.shape))
    dim = dimension % x.ndim
    if 0 in site.out.shape:
        return jnp.zeros(tuple(site.out.shape), x.dtype)
    starts = jnp.arange(site.out.shape[dim]) * step
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


@lowers("meshgrid")
def meshgrid(site: Site, *tensors, indexing=None):
    """Coordinates of a grid."""
    tensors = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    return tuple(jnp.meshgrid(*(jnp.atleast_1d(x) for x in tensors), indexing=indexing or "ij"))
