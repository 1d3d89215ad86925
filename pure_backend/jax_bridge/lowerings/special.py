"""Special functions where JAX's differ from torch's in value or gradient."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import wide, with_tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def polygamma(n: int, x: jax.Array) -> jax.Array:
    """The `n`-th derivative of digamma, by reflection left of zero: JAX's zeta function is for positive numbers."""
    if n == 0:
        pole = jnp.copysign(jnp.asarray(jnp.inf, x.dtype), -x)
        return jnp.where(x == 0, pole, lax.digamma(x))
    right = jnp.where(x < 0, 1 - x, x)
    zeta = lax.zeta(jnp.asarray(n + 1.0, x.dtype), jnp.where(right == 0, 1, right))
    zeta = jnp.where(right == 0, jnp.inf, jnp.where(jnp.isposinf(right), 0, zeta))  # which JAX calls NaN
    value = (-1) ** (n + 1) * math.factorial(n) * zeta
    cotangent = 1 / jnp.tan(np.pi * jnp.where(x < 0, x - jnp.round(x), 0.25))
    reflected = (-1) ** n * value - np.pi * jnp.polyval(jnp.asarray(_cotangent_derivative(n), x.dtype), cotangent)
    return jnp.where(x < 0, reflected, value)


@polygamma.defjvp
def _polygamma_jvp(n, primals, tangents):
    return polygamma(n, primals[0]), tangents[0] * polygamma(n + 1, primals[0])


def _cotangent_derivative(n: int) -> np.ndarray:
    """The `n`-th derivative of `cot(pi x)` as a polynomial in `cot(pi x)`: that of `c` is `-pi (1 + c^2)`."""
    polynomial = np.poly1d([1.0, 0.0])
    for _ in range(n):
        polynomial = polynomial.deriv() * np.poly1d([-np.pi, 0.0, -np.pi])
    return polynomial.coeffs


@lowers("digamma")
def digamma(site: Site, x):
    """The derivative of the logarithm of the gamma function."""
    return polygamma(0, wide(x.astype(site.dtype)))


@lowers("polygamma", "aten::polygamma")
def polygamma_(site: Site, n, x):
    """Torch's argument order, or that of the method."""
    n, x = (x, n) if isinstance(n, jax.Array) else (n, x)
    return polygamma(n, wide(x.astype(site.dtype)))


@lowers("special_erfcx")
def erfcx(site: Site, x):
    """`exp(x ** 2) * erfc(x)`, which is finite for all positive numbers."""
    return _erfcx(wide(x.astype(site.dtype)))


def _scaled_complement(x):
    """Left of zero by reflection, near zero as defined, and farther right by a continued fraction (DLMF 7.9.1)."""
    right = jnp.abs(x)
    near = jnp.exp(jnp.square(jnp.minimum(right, 2))) * lax.erfc(jnp.minimum(right, 2))
    last = lax.fori_loop(0, _TERMS, lambda i, f: right + (_TERMS - i) / (2 * f), jnp.maximum(right, 2))
    value = jnp.where(right < 2, near, 1 / (math.sqrt(math.pi) * last))
    return jnp.where(x < 0, 2 * jnp.exp(x * x) - value, value)


_TERMS = 100  # right to f64's rounding from 2 on
_erfcx = with_tangent(_scaled_complement, lambda x, t: t * (2 * x * _erfcx(x) - 2 / math.sqrt(math.pi)))


@lowers("special_modified_bessel_i1")
def modified_bessel_i1(site: Site, x):
    """torch's other name for `i1`; torchax's function is wrong left of -8."""
    return jax.scipy.special.i1(wide(x.astype(site.dtype)))


@lowers("special_zeta")
def zeta(site: Site, x, q):
    """The Hurwitz zeta function, with torch's poles and NaN."""
    x, q = (wide(jnp.asarray(a).astype(site.dtype)) for a in (x, q))
    left = q <= 0
    value = jnp.where(left & (x != jnp.floor(x)), jnp.nan, lax.zeta(x, q))
    value = jnp.where(left & (q == jnp.floor(q)), jnp.inf, value)
    return jnp.where(x == 1, jnp.inf, jnp.where(x < 1, jnp.nan, value))


def _incomplete_gamma(compute, lower: bool):
    """An incomplete gamma function with torch's limits where an argument is zero or infinite."""

    def lower_to_jax(site: Site, a, x):
        a, x = (wide(jnp.asarray(v).astype(site.dtype)) for v in (a, x))
        nothing, everything = (0, 1) if lower else (1, 0)
        value = jnp.where(jnp.isinf(x), everything, compute(a, x))
        value = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, nothing), value)
        value = jnp.where(x == 0, nothing, value)
        value = jnp.where(a == 0, jnp.where(x > 0, everything, jnp.nan), value)
        return jnp.where((a < 0) | (x < 0) | jnp.isnan(a) | jnp.isnan(x), jnp.nan, value)

    return lower_to_jax


lowers("igamma", "special_gammainc")(_incomplete_gamma(lax.igamma, lower=True))
lowers("igammac", "special_gammaincc")(_incomplete_gamma(lax.igammac, lower=False))


@lowers("aten::logit_backward")
def logit_backward(site: Site, grad, x, eps=None):
    """The gradient of `logit`: NaN outside of [0, 1], or 0 outside of [eps, 1 - eps]."""
    low, high, outside = (0, 1, jnp.nan) if eps is None else (eps, 1 - eps, 0)
    return jnp.where((x >= low) & (x <= high), grad / (x * (1 - x)), outside)


@lowers("special_log_ndtr")
def log_ndtr(site: Site, x):
    """The logarithm of the normal distribution function."""
    return jax.scipy.special.log_ndtr(wide(x.astype(site.dtype)))


@lowers("logcumsumexp", "aten::_logcumsumexp")
def logcumsumexp(site: Site, x, dim):
    """The logarithm of the running sum of exponentials."""
    x = wide(x)
    return lax.associative_scan(_logaddexp, x, axis=dim % x.ndim) if x.ndim and x.size else x


def _logaddexp(a, b):
    """`log(exp(a) + exp(b))`, also of complex numbers, ordered by their real parts."""
    if not jnp.iscomplexobj(a):
        return jnp.logaddexp(a, b)
    swap = b.real > a.real
    large, small = jnp.where(swap, b, a), jnp.where(swap, a, b)
    return large + jnp.log1p(jnp.exp(small - large))


@lowers("aten::_safe_softmax")
def safe_softmax(site: Site, x, dim, dtype=None):
    """A softmax that gives zeros, without gradient, where everything is `-inf`."""
    x = wide(x.astype(site.dtype))
    empty = jnp.all(jnp.isneginf(x), axis=dim, keepdims=True)
    return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, x), axis=dim))


@lowers("histc")
def histc(site: Site, x, bins=100, min=0, max=0):
    """How many elements lie in each of equal bins; those outside of the range are not counted."""
    x = wide(x).reshape(-1)
    low, high = jnp.asarray(min, x.dtype), jnp.asarray(max, x.dtype)
    if min == max and x.size:
        low, high = jnp.min(x), jnp.max(x)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    place = jnp.minimum(((x - low) * (bins / (high - low))).astype(jnp.int32), bins - 1)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, x.dtype).at[jnp.where(inside, place, bins)].add(1, mode="drop")
