"""Activation functions, computed in f32 for 16-bit floats as torch's kernels do."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import softmax, wide


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
    return jax.nn.relu(x)  # its gradient at 0 is 0, that of maximum is 1/2


@_activation("F.relu6", "relu6")
def relu6(x, inplace=False):
    return hardtanh(x, 0, 6)


@_activation("F.silu", "silu")
def silu(x, inplace=False):
    return x * jax.nn.sigmoid(x)


@_activation("F.gelu", "aten::gelu")
def gelu(x, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


@_activation("F.leaky_relu", "aten::leaky_relu")
def leaky_relu(x, negative_slope=0.01, inplace=False):
    return jnp.where(x > 0, x, x * negative_slope)


@_activation("F.elu", "aten::elu")
def elu(x, alpha=1.0, inplace=False, input_scale=1.0, *, scale=1.0):
    if not isinstance(inplace, bool):  # aten.elu(x, alpha, scale, input_scale)
        scale = inplace
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale))


@_activation("F.hardtanh", "aten::hardtanh")
def hardtanh(x, min_val=-1.0, max_val=1.0, inplace=False):
    return jnp.where(x <= min_val, min_val, jnp.where(x >= max_val, max_val, x))


@_activation("F.hardsigmoid", "aten::hardsigmoid")
def hardsigmoid(x, inplace=False):
    return hardtanh(x + 3, 0, 6) / 6


@_activation("F.hardswish", "aten::hardswish")
def hardswish(x, inplace=False):
    return x * hardtanh(x + 3, 0, 6) / 6


@_activation("F.softplus", "aten::softplus")
def softplus(x, beta=1, threshold=20):
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta)


@_activation("F.mish", "aten::mish")
def mish(x, inplace=False):
    return x * jnp.tanh(jax.nn.softplus(x))


@_activation("F.logsigmoid", "aten::log_sigmoid", "log_sigmoid")
def logsigmoid(x):
    return jax.nn.log_sigmoid(x)


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
