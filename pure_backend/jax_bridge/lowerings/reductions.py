"""Operators that fold dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import as_array, axes, magnitude, real_dtype, wide


def _accumulate(x, site: Site):
    """The operand in the type that torch accumulates in."""
    return wide(as_array(x, site.dtype))


@lowers("sum")
def sum_(site: Site, x, dim=None, keepdim=False, *, dtype=None, axis=None):
    """Sum over dimensions."""
    return jnp.sum(_accumulate(x, site), axes(dim if axis is None else axis, x.ndim), keepdims=keepdim)


@lowers("mean")
def mean(site: Site, x, dim=None, keepdim=False, *, dtype=None, axis=None):
    """Mean over dimensions."""
    return jnp.mean(_accumulate(x, site), axes(dim if axis is None else axis, x.ndim), keepdims=keepdim)


@lowers("nansum")
def nansum(site: Site, x, dim=None, keepdim=False, *, dtype=None):
    """Sum of what is not NaN."""
    return jnp.nansum(_accumulate(x, site), axes(dim, x.ndim), keepdims=keepdim)


@lowers("prod")
def prod(site: Site, x, dim=None, keepdim=False, *, dtype=None):
    """Product."""
    return jnp.prod(_accumulate(x, site), axes(dim, x.ndim), keepdims=keepdim)


def _moment(site: Site, x, dim, unbiased, keepdim, correction):
    if isinstance(dim, bool):  # var(x, unbiased)
        dim, unbiased = None, dim
    ddof = correction if correction is not None else (1 if unbiased is None else int(unbiased))
    return jnp.var(wide(x), axes(dim, x.ndim), ddof=ddof, keepdims=keepdim)


@lowers("var")
def var(site: Site, x, dim=None, unbiased=None, keepdim=False, *, correction=None):
    """Variance with Bessel's correction unless told otherwise."""
    return _moment(site, x, dim, unbiased, keepdim, correction)


@lowers("std")
def std(site: Site, x, dim=None, unbiased=None, keepdim=False, *, correction=None):
    """Standard deviation."""
    return _safe_sqrt(_moment(site, x, dim, unbiased, keepdim, correction))


def _extreme(fold, pick, pair):
    def lower(site: Site, x, dim=None, keepdim=False):
        if isinstance(dim, jax.Array):
            return pair(x.astype(site.dtype), dim.astype(site.dtype))
        if dim is None:
            return fold(x)
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        indices = pick(x, axis=dim, keepdims=True)
        values = jnp.take_along_axis(x, indices, axis=dim)
        return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))

    return lower


lowers("max")(_extreme(jnp.max, jnp.argmax, jnp.maximum))
lowers("min")(_extreme(jnp.min, jnp.argmin, jnp.minimum))


@lowers("amax")
def amax(site: Site, x, dim=(), keepdim=False):
    """Largest value; ties share the gradient."""
    return jnp.max(x, axes(dim, x.ndim), keepdims=keepdim)


@lowers("amin")
def amin(site: Site, x, dim=(), keepdim=False):
    """Smallest value."""
    return jnp.min(x, axes(dim, x.ndim), keepdims=keepdim)


def _arg(pick):
    def lower(site: Site, x, dim=None, keepdim=False):
        if x.ndim == 0:
            return jnp.zeros((), jnp.int64)
        return pick(x, axis=dim, keepdims=keepdim)

    return lower


lowers("argmax")(_arg(jnp.argmax))
lowers("argmin")(_arg(jnp.argmin))


@lowers("any")
def any_(site: Site, x, dim=None, keepdim=False):
    """Whether any element is true."""
    return jnp.any(x != 0, axes(dim, x.ndim), keepdims=keepdim)


@lowers("all")
def all_(site: Site, x, dim=None, keepdim=False):
    """Whether every element is true."""
    return jnp.all(x != 0, axes(dim, x.ndim), keepdims=keepdim)


@lowers("logsumexp")
def logsumexp(site: Site, x, dim, keepdim=False):
    """`log(sum(exp(x)))`, stably."""
    return jax.scipy.special.logsumexp(wide(x.astype(site.dtype)), axis=axes(dim, x.ndim), keepdims=keepdim)


def _cumulative(fn):
    def lower(site: Site, x, dim, *, dtype=None):
        x = _accumulate(x, site)
        return fn(x, axis=dim) if x.ndim else x

    return lower


lowers("cumsum")(_cumulative(jnp.cumsum))
lowers("cumprod")(_cumulative(jnp.cumprod))


@lowers("norm")
def norm(site: Site, x, p="fro", dim=None, keepdim=False, out=None, dtype=None):
    """Vector norm over dimensions; the nuclear norm is decomposed."""
    if p == "nuc":
        return NotImplemented
    x = wide(x.astype(site.dtype) if not jnp.issubdtype(x.dtype, jnp.complexfloating) else x)
    where = axes(dim, x.ndim)
    if p in ("fro", None, 2, 2.0):
        return _safe_sqrt(jnp.sum(_squared(x), where, keepdims=keepdim))
    size = magnitude(x)
    if p == float("inf"):
        return jnp.max(size, where, keepdims=keepdim)
    if p == float("-inf"):
        return jnp.min(size, where, keepdims=keepdim)
    if p == 0:
        return jnp.sum(size != 0, where, keepdims=keepdim).astype(real_dtype(x.dtype))
    if p == 1:
        return jnp.sum(size, where, keepdims=keepdim)
    return _safe_power(jnp.sum(_safe_power(size, p), where, keepdims=keepdim), 1 / p)


def _squared(x):
    return (x * jnp.conj(x)).real if jnp.issubdtype(x.dtype, jnp.complexfloating) else x * x


def _safe_power(x, p):
    """`x ** p` of non-negative `x`, whose gradient at 0 is 0."""
    return jnp.where(x > 0, jnp.where(x > 0, x, 1) ** p, 0)


def _safe_sqrt(x):
    """The square root whose gradient at 0 is 0, as that of torch's norm and std."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), x)


@lowers("aten::linalg_vector_norm", "linalg_vector_norm")
def vector_norm(site: Site, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """Vector norm."""
    return norm(site, x, ord, dim, keepdim)


@lowers("median")
def median(site: Site, x, dim=None, keepdim=False):
    """The lower median of all elements; elements equal to it share the gradient. Along a dimension it is decomposed."""
    if dim is not None or x.size == 0:
        return NotImplemented
    middle = jax.lax.stop_gradient(jnp.sort(x.reshape(-1))[(x.size - 1) // 2])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return middle
    shared = jnp.mean(x, where=x == middle)
    value = middle + (shared - jax.lax.stop_gradient(shared))
    return jnp.where(jnp.any(jnp.isnan(x)), jnp.nan, value)


@lowers("cdist", "aten::_cdist_forward")
def cdist(site: Site, x1, x2, p=2.0, compute_mode=None):
    """Distances of all pairs of rows: `f[..., n, d], f[..., m, d] -> f[..., n, m]`; equal rows have gradient 0."""
    return norm(site, x1[..., :, None, :] - x2[..., None, :, :], p, -1)


@lowers("count_nonzero")
def count_nonzero(site: Site, x, dim=None):
    """How many elements are not zero."""
    return jnp.count_nonzero(x, axes(dim, x.ndim))
