"""Activation functions, computed in f32 for 16-bit floats as torch's kernels do."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import softmax, wide, with_tangent


def _activation(*names: str):
    """Register `fn(x, ...)`; an `inplace` argument changes nothing about the value."""

    def register(fn):
        def lower(site: Site, x, *args, inplace=False, **kwargs):
            x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(site.dtype)
            return fn(wide(x), *args, **kwargs).astype(site.dtype)

        lower.__qualname__ = fn.__qualname__
        lowers(*names)(lower)
        return fn

    return register


_activation("sigmoid", "F.sigmoid", "expit")(jax.nn.sigmoid)


@_activation("relu", "F.relu")
def relu(x, inplace=False):
    return _relu(x)


_relu = with_tangent(lambda x: jnp.maximum(x, 0), lambda x, t: jnp.where(x <= 0, 0, t))  # 0 at 0, and NaN passes


@_activation("F.relu6", "relu6")
def relu6(x, inplace=False):
    return hardtanh(x, 0, 6)


@_activation("F.silu", "silu")
def silu(x, inplace=False):
    return x * jax.nn.sigmoid(x) if jnp.iscomplexobj(x) else _silu(x)


def _silu_tangent(x, t):
    gate = jax.nn.sigmoid(x)
    return t * (gate * (1 + x * (1 - gate)))


_silu = with_tangent(lambda x: x * jax.nn.sigmoid(x), _silu_tangent)


@_activation("F.gelu", "aten::gelu")
def gelu(x, approximate="none"):
    return _gelu_tanh(x) if approximate == "tanh" else _gelu(x)


def _normal(x):
    """The normal distribution function."""
    return 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))


_gelu = with_tangent(
    lambda x: 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5))),
    lambda x, t: t * (_normal(x) + x * (jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))),
)


def _gelu_bend(x):
    return jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def _gelu_tanh_tangent(x, t):
    bend = _gelu_bend(x)
    return t * (0.5 * (1 + bend) + 0.5 * x * (1 - bend * bend) * (math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)))


_gelu_tanh = with_tangent(lambda x: 0.5 * x * (1 + _gelu_bend(x)), _gelu_tanh_tangent)


@_activation("F.leaky_relu", "aten::leaky_relu")
def leaky_relu(x, negative_slope=0.01, inplace=False):
    return jnp.where(x > 0, x, x * negative_slope)


@_activation("F.celu", "celu")
def celu(x, alpha=1.0, inplace=False):
    return elu(x, alpha, 1.0, 1 / alpha)


@_activation("F.elu", "aten::elu")
def elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    scale = 1.0 if isinstance(scale, bool) else scale  # F.elu(x, alpha, inplace)

    def below(x):
        return jnp.where(x <= 0, x, 0) * input_scale  # finite where the derivative does not read it

    def value(x):
        return scale * jnp.where(x <= 0, alpha * jnp.expm1(below(x)), x)

    def tangent(x, t):
        return jnp.where(x <= 0, t * (scale * alpha * input_scale) * jnp.exp(below(x)), t * scale)

    return with_tangent(value, tangent)(x)


@_activation("F.hardtanh", "aten::hardtanh")
def hardtanh(x, min_val=-1.0, max_val=1.0, inplace=False):
    limited = with_tangent(
        lambda x: jnp.where(x <= min_val, min_val, jnp.where(x >= max_val, max_val, x)),
        lambda x, t: jnp.where((x > min_val) & (x < max_val), t, 0),
    )
    return limited(x)


@_activation("F.hardsigmoid", "aten::hardsigmoid")
def hardsigmoid(x, inplace=False):
    return hardtanh(x + 3, 0, 6) / 6


@_activation("F.hardswish", "aten::hardswish")
def hardswish(x, inplace=False):
    return x * hardtanh(x + 3, 0, 6) / 6


@_activation("F.softshrink", "aten::softshrink")
def softshrink(x, lambd=0.5):
    def value(x):
        return jnp.where(jnp.abs(x) <= lambd, 0, x - jnp.copysign(jnp.asarray(lambd, x.dtype), x))

    return with_tangent(value, lambda x, t: jnp.where(jnp.abs(x) <= lambd, 0, t))(x)


@_activation("F.hardshrink", "hardshrink", "aten::hardshrink")
def hardshrink(x, lambd=0.5):
    def value(x):
        return jnp.where(jnp.abs(x) <= lambd, 0, x)

    return with_tangent(value, lambda x, t: jnp.where(jnp.abs(x) > lambd, t, 0))(x)


@_activation("F.softplus", "aten::softplus")
def softplus(x, beta=1, threshold=20):
    def power(x):
        return jnp.exp(jnp.minimum(x * beta, threshold))

    def value(x):
        return jnp.where(x * beta > threshold, x, jnp.log1p(power(x)) / beta)

    def tangent(x, t):
        return jnp.where(x * beta > threshold, t, t * (power(x) / (power(x) + 1)))

    return with_tangent(value, tangent)(x)


@_activation("F.mish", "aten::mish")
def mish(x, inplace=False):
    return _mish(x)


def _mish_tangent(x, t):
    bend = jnp.tanh(jax.nn.softplus(x))
    return t * (bend + x * jax.nn.sigmoid(x) * (1 - bend * bend))


_mish = with_tangent(lambda x: x * jnp.tanh(jax.nn.softplus(x)), _mish_tangent)


@_activation("F.logsigmoid", "aten::log_sigmoid", "log_sigmoid")
def logsigmoid(x):
    return _logsigmoid(x)


def _logsigmoid_tangent(x, t):
    decay = jnp.exp(-jnp.abs(x))
    return t * jnp.where(x < 0, 1 - decay / (1 + decay), decay / (1 + decay))


_logsigmoid = with_tangent(jax.nn.log_sigmoid, _logsigmoid_tangent)


@_activation("F.tanh")
def tanh(x):
    return jnp.tanh(x)


def _softmax(fn):
    def lower(site: Site, x, dim=None, _stacklevel=3, dtype=None):
        if not isinstance(_stacklevel, int) or isinstance(_stacklevel, bool):
            dtype = None if isinstance(_stacklevel, bool) else _stacklevel  # torch.softmax(x, dim, dtype)
        x = wide(x.astype(site.dtype) if dtype is not None else x)
        return (fn(x, axis=dim) if x.ndim else fn(x[None], axis=0)[0]).astype(site.dtype)

    return lower


lowers("softmax", "F.softmax", "aten::_softmax")(_softmax(softmax))
lowers("log_softmax", "F.log_softmax", "aten::_log_softmax")(_softmax(jax.nn.log_softmax))


@lowers("F.glu", "aten::glu")
def glu(site: Site, x, dim=-1):
    """Half of `x` gated by the other half."""
    a, b = jnp.split(wide(x), 2, axis=dim)
    return a * jax.nn.sigmoid(b)
