"""Functions that read and write by index; subscripts are in `subscript`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.lowerings import places
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, unsupported, updates
from pure_backend.jax_bridge.lowerings.values import as_array, keep_gradient_of


@lowers("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag_kernel(site: Site, *args, **kwargs):
    """What EmbeddingBag with `max_norm` or `scale_grad_by_freq` comes down to."""
    raise unsupported(site, "EmbeddingBag with max_norm or scale_grad_by_freq has no JAX lowering")


@lowers("put")
def put(site: Site, x, index, source, accumulate=False):
    """Values put, or added, at places of the flattened tensor."""
    flat, where = x.reshape(-1), index.reshape(-1)
    how = "add" if accumulate else "set"
    return places.write(flat, where, source.reshape(-1).astype(x.dtype), how, wraps=True).reshape(x.shape)


@lowers("aten::_unsafe_masked_index")
def unsafe_masked_index(site: Site, x, mask, indices, fill):
    """`x[indices]` where the mask is true; elsewhere an index may be out of range and the fill value is read."""
    picked = x[tuple(_clipped(x, indices))]
    return jnp.where(_beside(mask, picked), picked, as_array(fill, x.dtype))


@lowers("aten::_unsafe_masked_index_put_accumulate")
def unsafe_masked_index_put_accumulate(site: Site, x, mask, indices, values):
    """Values added at `indices` where the mask is true."""
    return x.at[tuple(_clipped(x, indices))].add(jnp.where(_beside(mask, values), values, 0))


def _clipped(x, indices):
    """Indices within range, and whole dimensions for None."""
    for dim, index in enumerate(indices):
        yield slice(None) if index is None else jnp.clip(index, -x.shape[dim], max(x.shape[dim] - 1, 0))


def _beside(mask, values):
    """A mask of the indexed dimensions, with the others of `values` behind it."""
    return mask.reshape(*mask.shape, *(1,) * (values.ndim - mask.ndim))


@lowers("nonzero_static")
def nonzero_static(site: Site, x, *, size, fill_value=-1):
    """The places of nonzero elements: the first `size` of them, filled up."""
    if x.ndim == 0 or size == 0:
        return jnp.full(tuple(site.out.shape), fill_value, jnp.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1)


@lowers("F.embedding")
@updates
def embedding(site: Site, ids, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    """Rows of `weight: f[entries, width]`; the row of `padding_idx` gets no gradient."""
    _refuse_sparse(site, sparse)
    used = weight if max_norm is None else _renormed(weight, ids, max_norm, norm_type)
    rows = places.read(used, ids)
    if scale_grad_by_freq:
        counts = places.read(jnp.zeros(weight.shape[0], rows.dtype).at[ids].add(1), ids)
        rows = _with_gradient_scaled(rows, 1 / counts[..., None])
    if padding_idx is not None:
        padding = (ids == padding_idx % weight.shape[0])[..., None]
        rows = jnp.where(padding, lax.stop_gradient(rows), rows)
    return (rows, used) if site.writes else rows


@lowers("aten::embedding")
def aten_embedding(site: Site, weight, ids, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    """ATen's argument order; -1 is no padding."""
    return embedding(site, ids, weight, padding_idx if padding_idx >= 0 else None, None, 2.0, scale_grad_by_freq, sparse)


def _refuse_sparse(site: Site, sparse: bool) -> None:
    """Leave a call to eager whose gradient is a sparse tensor."""
    if sparse and site.out.requires_grad:
        raise unsupported(site, "its gradient is a sparse tensor")


@jax.custom_jvp
def _with_gradient_scaled(x, scale):
    return x


@_with_gradient_scaled.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] * primals[1]


@lowers("aten::embedding_renorm")
def embedding_renorm(site: Site, weight, ids, max_norm, norm_type):
    """The rows that are used, scaled down to `max_norm`."""
    return _renormed(weight, ids, max_norm, norm_type)


def _renormed(weight, ids, max_norm, norm_type):
    """Renormed rows; the renorm is not differentiated, as in torch."""
    norms = jnp.sum(jnp.abs(weight) ** norm_type, axis=1, keepdims=True) ** (1 / norm_type)
    used = jnp.zeros(weight.shape[0], bool).at[ids.reshape(-1)].set(True)[:, None]
    return keep_gradient_of(jnp.where(used & (norms > max_norm), weight * (max_norm / (norms + 1e-7)), weight), weight)


@lowers("F.embedding_bag")
def embedding_bag(
    site: Site,
    ids,
    weight,
    offsets=None,
    max_norm=None,
    norm_type=2,
    scale_grad_by_freq=False,
    mode="mean",
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=None,
):
    """Sums, means or maxima of bags of rows; bags are the rows of 2-D ids, or begin at the offsets in 1-D ids."""
    _refuse_sparse(site, sparse)
    if max_norm is not None or scale_grad_by_freq:
        raise unsupported(site, "EmbeddingBag with max_norm or scale_grad_by_freq has no JAX lowering")
    bags = site.out.shape[0]
    if ids.ndim == 2:
        bag = jnp.repeat(jnp.arange(ids.shape[0]), ids.shape[1], total_repeat_length=ids.size)
    else:
        bag = jnp.searchsorted(offsets[:bags], jnp.arange(ids.size), side="right") - 1
    rows = places.read(weight, ids.reshape(-1))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    counted = jnp.ones(ids.size, bool) if padding_idx is None else ids.reshape(-1) != padding_idx % weight.shape[0]
    if mode == "max":
        largest = jax.ops.segment_max(jnp.where(counted[:, None], rows, -jnp.inf), bag, bags)
        return jnp.where(jnp.isneginf(largest), 0, largest)
    total = jax.ops.segment_sum(jnp.where(counted[:, None], rows, 0), bag, bags)
    if mode == "sum":
        return total
    sizes = jax.ops.segment_sum(counted.astype(total.dtype), bag, bags)
    return total / jnp.maximum(sizes, 1)[:, None]


@lowers("index_select")
def index_select(site: Site, x, dim, index):
    """Slices at the given indices."""
    if x.ndim == 0:
        return x
    return places.read(x, _along(x, dim, index))


def _along(x, dim: int, index) -> tuple:
    """The subscript of slices along a dimension."""
    return (*(slice(None),) * (dim % x.ndim), jnp.atleast_1d(index))


@lowers("gather")
def gather(site: Site, x, dim, index, *, sparse_grad=False):
    """`out[i][j] = x[index[i][j]][j]` for `dim=0`."""
    _refuse_sparse(site, sparse_grad)
    if x.ndim == 0 or index.ndim == 0:
        return places.read(x.reshape(-1), index)
    dim = dim % x.ndim
    crop = tuple(slice(None) if d == dim else slice(0, index.shape[d]) for d in range(x.ndim))
    return places.read_along(x[crop], index, dim)


@lowers("take_along_dim")
def take_along_dim(site: Site, x, indices, dim=None):
    """Gather with broadcast."""
    if dim is None:
        x, indices, dim = x.reshape(-1), indices.reshape(-1), 0
    return places.read_along(x, indices, dim)


@lowers("take")
def take(site: Site, x, index):
    """Elements of the flattened tensor."""
    return places.read(x.reshape(-1), index, wraps=True)


def scattered(x, dim, index, source, how: str):
    """`x` with `source` combined in at `index`, as torch scatters; `how` is a method of `x.at[...]`."""
    if x.ndim == 0:
        return places.write(x.reshape(1), index.reshape(-1), jnp.broadcast_to(source, index.shape).reshape(-1), how).reshape(())
    dim = dim % x.ndim
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij"))
    grid[dim] = index
    if isinstance(source, jax.Array) and source.ndim:
        source = source[tuple(slice(0, n) for n in index.shape)]
    return places.write(x, tuple(grid), source, how)


@lowers("scatter")
def scatter(site: Site, x, dim, index, src=None, *, value=None, reduce=None):
    """Writes at indices."""
    source = as_array(value if src is None else src, x.dtype)
    how = {None: "set", "add": "add", "multiply": "multiply"}[reduce]
    return scattered(x, dim, index, source, how)


@lowers("scatter_add")
def scatter_add(site: Site, x, dim, index, src):
    """Sums at indices."""
    return scattered(x, dim, index, src.astype(x.dtype), _adding(x))


@lowers("index_add")
def index_add(site: Site, x, dim, index, source, *, alpha=1):
    """Adds slices at indices."""
    source = source.astype(x.dtype)
    if x.ndim == 0:
        return x + alpha * jnp.sum(source)
    return places.write(x, _along(x, dim, index), source if alpha == 1 else source * alpha, _adding(x))


def _adding(x) -> str:
    """How sums are made at indices; a sum of bools is "or"."""
    return "max" if x.dtype == jnp.bool_ else "add"


@lowers("index_copy")
def index_copy(site: Site, x, dim, index, source):
    """Writes slices at indices."""
    if x.ndim == 0:
        return source.reshape(())
    return places.write(x, _along(x, dim, index), source.astype(x.dtype))


@lowers("index_fill")
def index_fill(site: Site, x, dim, index, value):
    """Writes one value into slices at indices."""
    if x.ndim == 0:
        return as_array(value, x.dtype).reshape(())
    return places.write(x, _along(x, dim, index), as_array(value, x.dtype), wraps=True)


@lowers("masked_scatter")
def masked_scatter(site: Site, x, mask, source):
    """Elements of `source`, in order, where the mask is true."""
    x = jnp.broadcast_to(x, tuple(site.out.shape))
    mask = jnp.broadcast_to(mask, x.shape)
    position = jnp.cumsum(mask.reshape(-1)) - 1
    picked = jnp.take(source.reshape(-1), position, mode="clip").reshape(x.shape)
    return jnp.where(mask, picked.astype(x.dtype), x)


@lowers("aten::slice_scatter")
def slice_scatter(site: Site, x, source, dim=0, start=None, end=None, step=1):
    """`x` with a slice replaced."""
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x.at[tuple(index)].set(source.astype(x.dtype))


@lowers("select_scatter")
def select_scatter(site: Site, x, source, dim, index):
    """`x` with one index replaced."""
    where = [slice(None)] * x.ndim
    where[dim] = index
    return x.at[tuple(where)].set(source.astype(x.dtype))


@lowers("topk")
def topk(site: Site, x, k, dim=-1, largest=True, sorted=True):
    """The `k` largest or smallest elements."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    moved = jnp.moveaxis(x, dim, -1)
    order = jnp.argsort(moved, axis=-1, descending=largest, stable=True)[..., :k]
    values = jnp.take_along_axis(moved, order, axis=-1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(order, -1, dim)


@lowers("sort")
def sort(site: Site, x, dim=-1, descending=False, *, stable=False):
    """Sorted values and their indices."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(x, order, axis=dim), order


@lowers("searchsorted", "aten::searchsorted")
def searchsorted(site: Site, sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    """Positions in sorted rows; the rows of `sequence` match those of `values`."""
    side = side or ("right" if right else "left")
    values = jnp.asarray(values)
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, axis=-1)
    if sequence.ndim == 1:
        return _bisected(sequence, values, side)
    rows, queries = sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1])
    return jax.vmap(lambda row, query: _bisected(row, query, side))(rows, queries).reshape(values.shape)


def _bisected(row, values, side: str):
    """Where torch's bisection ends: a NaN is sought behind everything, and an unsorted row has its answer too."""
    compare = jnp.greater if side == "right" else jnp.greater_equal

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        behind = (low < high) & ~compare(row[jnp.minimum(middle, row.size - 1)], values)
        return jnp.where(behind, middle + 1, low), jnp.where(behind, high, jnp.minimum(middle, high))

    low = jnp.zeros(values.shape, jnp.int64)
    if row.size == 0:
        return low
    return lax.fori_loop(0, row.size.bit_length(), halve, (low, jnp.full_like(low, row.size)))[0]


@lowers("bucketize", "aten::bucketize")
def bucketize(site: Site, x, boundaries, *, out_int32=False, right=False):
    """Positions among boundaries."""
    return _bisected(boundaries, jnp.asarray(x), "right" if right else "left")


@lowers("argsort")
def argsort(site: Site, x, dim=-1, descending=False, stable=False):
    """Indices that sort."""
    return jnp.argsort(x, axis=dim, descending=descending, stable=True) if x.ndim else jnp.zeros((), jnp.int64)
