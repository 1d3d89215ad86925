"""Operators that fold dimensions."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import as_array, axes, keep_gradient_of, magnitude, real_dtype, wide, with_tangent


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
    return variance(wide(x), axes(dim, x.ndim), ddof, keepdim)[0]


def variance(x, over, ddof, keepdim: bool = False):
    """Variance and mean. Taken from the first element on, so that equal elements have none and large ones do not overflow."""
    over = tuple(range(x.ndim)) if over is None else over
    count = math.prod(x.shape[i] for i in over)
    if not x.size:
        return jnp.var(x, over, keepdims=keepdim), jnp.mean(x, over, keepdims=keepdim)
    first = lax.stop_gradient(x[tuple(slice(0, 1) if i in over else slice(None) for i in range(x.ndim))])
    moved = x - first
    mean = jnp.mean(moved, over, keepdims=True)
    scale = 1 / math.sqrt(count - ddof) if count > ddof else 1.0  # within the square, which then does not overflow
    squares = jnp.sum(_squared((moved - mean) * scale), over, keepdims=keepdim)
    mean = mean + first
    return squares if count > ddof else squares / 0, mean if keepdim else mean.squeeze(over)


@lowers("var")
def var(site: Site, x, dim=None, unbiased=None, keepdim=False, *, correction=None):
    """Variance with Bessel's correction unless told otherwise."""
    return _moment(site, x, dim, unbiased, keepdim, correction)


@lowers("std")
def std(site: Site, x, dim=None, unbiased=None, keepdim=False, *, correction=None):
    """Standard deviation."""
    return _safe_sqrt(_moment(site, x, dim, unbiased, keepdim, correction))


@lowers("var_mean")
def var_mean(site: Site, x, dim=None, unbiased=None, keepdim=False, *, correction=None):
    """Variance and mean."""
    if isinstance(dim, bool):  # var_mean(x, unbiased)
        dim, unbiased = None, dim
    ddof = correction if correction is not None else (1 if unbiased is None else int(unbiased))
    return variance(wide(x), axes(dim, x.ndim), ddof, keepdim)


@lowers("std_mean")
def std_mean(site: Site, x, dim=None, unbiased=None, keepdim=False, *, correction=None):
    """Standard deviation and mean."""
    var, mean = var_mean(site, x, dim, unbiased, keepdim, correction=correction)
    return _safe_sqrt(var), mean


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
        length = euclidean(x, tuple(range(x.ndim)) if where is None else where)
        return length if keepdim else length.squeeze(tuple(range(x.ndim)) if where is None else where)
    size = magnitude(x)
    if p == float("inf"):
        return jnp.max(size, where, keepdims=keepdim)
    if p == float("-inf"):
        return jnp.min(size, where, keepdims=keepdim)
    if p == 0:
        return jnp.sum(size != 0, where, keepdims=keepdim).astype(real_dtype(x.dtype))
    if p == 1:
        return jnp.sum(size, where, keepdims=keepdim)
    power = _safe_power if p > 0 else jnp.power
    return power(jnp.sum(power(size, p), where, keepdims=keepdim), 1 / p)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def euclidean(x, over: tuple[int, ...]):
    """The Euclidean norm over dimensions, which stay with size 1. Where it is 0 its gradient is 0, as in torch."""
    return jnp.sqrt(jnp.sum(_squared(x), over, keepdims=True))


@euclidean.defjvp
def _(over, primals, tangents):
    length = euclidean(primals[0], over)
    direction = jnp.where(length == 0, 0, primals[0] / length)
    return length, jnp.sum((jnp.conj(direction) * tangents[0]).real, over, keepdims=True)


def _squared(x):
    return (x * jnp.conj(x)).real if jnp.issubdtype(x.dtype, jnp.complexfloating) else x * x


def _safe_power(x, p):
    """`x ** p` of non-negative `x`, whose gradient at 0 is 0."""
    return jnp.where(x == 0, 0, jnp.where(x == 0, 1, x) ** p)


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
    """The lower median of all elements, or along a dimension with its index; a NaN is the median."""
    if dim is not None and x.ndim and x.size:
        return _median_along(x, dim, keepdim, jnp.any(_isnan(x), dim, keepdims=True))
    if dim is not None or x.size == 0:
        return NotImplemented
    middle = jax.lax.stop_gradient(jnp.sort(x.reshape(-1))[(x.size - 1) // 2])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return middle
    shared = jnp.mean(x, where=x == middle)
    value = keep_gradient_of(middle, shared)
    return jnp.where(jnp.any(jnp.isnan(x)), jnp.nan, value)


def _median_along(x, dim: int, keepdim: bool, nan):
    """The lower median of what is no NaN; where `nan`, the first NaN."""
    order = jnp.argsort(x, axis=dim, stable=True)  # NaN comes last
    middle = (jnp.sum(~_isnan(x), dim, keepdims=True) - 1) // 2
    index = jnp.take_along_axis(order, jnp.maximum(middle, 0), axis=dim)
    index = jnp.where(nan, jnp.argmax(_isnan(x), axis=dim, keepdims=True), index)
    values = jnp.take_along_axis(x, index, axis=dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def _isnan(x):
    return jnp.isnan(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, bool)


@lowers("nanmedian")
def nanmedian(site: Site, x, dim=None, keepdim=False):
    """The lower median of what is no NaN."""
    if dim is None or not x.ndim or not x.size:
        return NotImplemented
    return _median_along(x, dim, keepdim, jnp.all(_isnan(x), dim, keepdims=True))


def _running_extreme(beats):
    def lower(site: Site, x, dim):
        """Running extremes and the index of the last element that was one; a NaN is one from where it stands."""
        if not x.ndim or not x.size:
            return x, jnp.zeros(x.shape, jnp.int64)

        def later(left, right):
            taken = _isnan(right[0]) | beats(right[0], left[0])
            return jnp.where(taken, right[0], left[0]), jnp.where(taken, right[1], left[1])

        index = lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)
        return lax.associative_scan(later, (x, index), axis=dim % x.ndim)

    return lower


lowers("cummax")(_running_extreme(jnp.greater_equal))
lowers("cummin")(_running_extreme(jnp.less_equal))


@lowers("cdist", "aten::_cdist_forward")
def cdist(site: Site, x1, x2, p=2.0, compute_mode=None):
    """Distances of all pairs of rows: `f[..., n, d], f[..., m, d] -> f[..., n, m]`; equal rows have gradient 0."""
    return _lengths(site, x1[..., :, None, :] - x2[..., None, :, :], p)


@lowers("aten::_pdist_forward")
def pdist(site: Site, x, p=2.0):
    """Distances of each row to those behind it: `f[n, d] -> f[n * (n - 1) / 2]`."""
    first, second = jnp.triu_indices(x.shape[0], 1)
    return _lengths(site, x[first] - x[second], p)


def _lengths(site: Site, gaps, p):
    """Norms along the last dimension as distances have them: what is NaN counts as one, and has a NaN as gradient."""
    if p == 0:
        return jnp.sum(jnp.minimum(jnp.ceil(jnp.abs(gaps)), 1), -1)
    if p == 1:
        return jnp.sum(_absolute(gaps), -1)
    return norm(site, gaps, p, -1)


_absolute = with_tangent(jnp.abs, lambda x, t: t * jnp.sign(x))


@lowers("count_nonzero")
def count_nonzero(site: Site, x, dim=None):
    """How many elements are not zero."""
    return jnp.count_nonzero(x, axes(dim, x.ndim))
