"""Scatter with a reduction, in torch's sense of `index`, and of its gradients at ties and zeros."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.lowerings import places
from pure_backend.jax_bridge.lowerings.indexing import scattered
from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import as_array, keep_gradient_of


@lowers("scatter_reduce", "aten::scatter_reduce.two")
def scatter_reduce(site: Site, x, dim, index, src, reduce, *, include_self=True):
    """`src` combined into `x` at `index` along `dim`."""
    if x.dtype == jnp.bool_:
        x, src = x.astype(jnp.int32), src.astype(jnp.int32)
        return scatter_reduce(site, x, dim, index, src, reduce, include_self=include_self) != 0
    x = x.reshape(1) if x.ndim == 0 else x
    index, src = (a.reshape(1) if a.ndim == 0 else a for a in (index, src))
    src = src[tuple(slice(0, n) for n in index.shape)].astype(x.dtype)

    def put(index, target, values, how):
        return scattered(target, dim, index, values, how)

    return _reduced(x, src, put, index, reduce, include_self).reshape(tuple(site.out.shape))


@lowers("index_reduce")
def index_reduce(site: Site, x, dim, index, source, reduce, *, include_self=True):
    """Slices of `source` combined into `x` at `index` along `dim`."""
    shape = x.shape
    x, source = (a.reshape(1) if a.ndim == 0 else a for a in (x, source))
    before = (slice(None),) * (dim % x.ndim)

    def put(index, target, values, how):
        return places.write(target, (*before, index), values, how)

    return _reduced(x, source.astype(x.dtype), put, jnp.atleast_1d(index), reduce, include_self).reshape(shape)


def _reduced(x, src, put_at, index, reduce: str, include_self: bool):
    """`put_at(index, target, values, how)` combines values into a target."""
    put = functools.partial(put_at, index)
    hits = put(jnp.zeros(x.shape, jnp.int32), jnp.ones(src.shape, jnp.int32), "add")
    own = jnp.ones(x.shape, bool) if include_self else hits == 0  # which elements of `x` take part
    if reduce in ("sum", "mean"):
        total = put(jnp.where(own, x, 0), src, "add")
        count = (hits + own).astype(x.dtype)
        return total if reduce == "sum" else _divided(total, count)
    if reduce == "prod":
        return _product(put_at, jnp.where(own, x, 1), src, index)
    return _extreme(x, src, own, put, {"amax": "max", "amin": "min"}[reduce])


def _divided(total, count):
    return jnp.floor_divide(total, count) if jnp.issubdtype(total.dtype, jnp.integer) else total / count


def _extreme(x, src, own, put, how: str):
    """The largest or smallest; elements that tie share the gradient, also with an element of `x` that takes no part."""
    worst = _worst(x.dtype, how)
    best = lax.stop_gradient(put(jnp.where(own, x, worst), src, how))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return best
    ties = x == best
    here = own & ties
    there = src == _read_back(best, src, put)
    count = put(ties.astype(x.dtype), there.astype(x.dtype), "add")
    shared = put(jnp.where(here, x, 0), jnp.where(there, src, 0), "add") / jnp.maximum(count, 1)
    return keep_gradient_of(best, shared)


def _worst(dtype, how: str):
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if how == "max" else jnp.inf, dtype)
    info = jnp.iinfo(dtype)
    return as_array(info.min if how == "max" else info.max, dtype)


def _read_back(target, src, put):
    """`target` where each element of `src` was put: what the transpose of putting reads."""
    _, transposed = jax.vjp(lambda values: put(jnp.zeros_like(target), values, "add"), jnp.zeros_like(src))
    return transposed(target)[0]


def _product(put_at, x, src, index):
    """The product, with the gradient of torch's `scatter_reduce_backward`: by division, but at zeros."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _float_product(put_at, x, src, index)
    return put_at(index, x, src, "multiply")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _float_product(put_at, x, src, index):
    return put_at(index, x, src, "multiply")


@_float_product.defjvp
def _float_product_jvp(put_at, primals, tangents):
    x, src, index = primals
    put = functools.partial(put_at, index)
    result, safe_x, zero = put(x, src, "multiply"), jnp.where(x == 0, 1, x), src == 0
    zeros = _read_back(put(jnp.zeros_like(x), zero.astype(x.dtype), "add"), src, put)
    single = zero & (zeros == 1)
    others = _read_back(put(x, jnp.where(single, 1, src), "multiply"), src, put)
    by_x = put(safe_x, src, "multiply") / safe_x
    by_src = jnp.where(single, others, _read_back(result, src, put) / jnp.where(zero, 1, src))
    return result, put(tangents[0] * by_x, tangents[1] * by_src, "add")
