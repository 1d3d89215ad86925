"""Normalization layers, computed in f32 for 16-bit floats."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.lowerings.elementwise import at_least
from pure_backend.jax_bridge.lowerings.reductions import euclidean
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, unsupported, updates
from pure_backend.jax_bridge.lowerings.values import axes, keep_gradient_of, wide


def _normalized(x, over, eps):
    mean = jnp.mean(x, over, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), over, keepdims=True)
    return (x - mean) * lax.rsqrt(var + eps), mean, var


def _affine(x, weight, bias, shape=None):
    """Scale and shift, the parameters seen in `shape`."""
    if weight is not None:
        x = x * wide(weight if shape is None else weight.reshape(shape))
    if bias is not None:
        x = x + wide(bias if shape is None else bias.reshape(shape))
    return x


@lowers("F.layer_norm", "layer_norm", "aten::layer_norm")
def layer_norm(site: Site, x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """Normalization over the last dimensions."""
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    out, _, _ = _normalized(wide(x), over, eps)
    return _affine(out, weight, bias).astype(site.dtype)


@lowers("aten::native_layer_norm")
def native_layer_norm(site: Site, x, normalized_shape, weight, bias, eps):
    """`(out, mean, rstd)`."""
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    out, mean, var = _normalized(wide(x), over, eps)
    return _affine(out, weight, bias), mean, lax.rsqrt(var + eps)


@lowers("F.rms_norm", "rms_norm")
def rms_norm(site: Site, x, normalized_shape, weight=None, eps=None):
    """Division by the root mean square of the last dimensions."""
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    work = wide(x)
    out = work * lax.rsqrt(jnp.mean(jnp.square(work), over, keepdims=True) + eps)
    return _affine(out, weight, None).astype(site.dtype)


@lowers("F.group_norm", "group_norm")
def group_norm(site: Site, x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    """Normalization over groups of channels."""
    grouped = wide(x).reshape(x.shape[0], num_groups, -1)
    out, _, _ = _normalized(grouped, (2,), eps)
    return _affine(out.reshape(x.shape), weight, bias, _channels(x)).astype(site.dtype)


@lowers("aten::native_group_norm")
def native_group_norm(site: Site, x, weight, bias, n, c, hw, groups, eps):
    """`(out, mean, rstd)`."""
    out, mean, var = _normalized(wide(x).reshape(n, groups, -1), (2,), eps)
    out = _affine(out.reshape(x.shape), weight, bias, _channels(x))
    return out, mean.reshape(n, groups), lax.rsqrt(var + eps).reshape(n, groups)


def _channels(x) -> tuple[int, ...]:
    return (1, -1) + (1,) * (x.ndim - 2)


def _running(stat, new, momentum):
    return ((1 - momentum) * wide(stat) + momentum * new).astype(stat.dtype)


def _moved(x, running_mean, running_var, mean, var, momentum) -> tuple:
    """The running statistics after a batch `x`, which leaves them alone where it has no elements."""
    if not x.size:
        return running_mean, running_var
    n = x.size // x.shape[1]
    mean, var = lax.stop_gradient(mean), lax.stop_gradient(var) * (n / max(n - 1, 1))
    return _running(running_mean, mean, momentum), _running(running_var, var, momentum)


@lowers("F.batch_norm")
@updates
def batch_norm(site: Site, x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """Normalization of each channel; in training by the batch, whose statistics move the running ones.

    A writing call returns `(out, new running_mean, new running_var)`; the running variance takes the unbiased one.
    """
    work, shape = wide(x), _channels(x)
    if not training:
        scale = lax.rsqrt(wide(running_var) + eps).reshape(shape)
        return _affine((work - wide(running_mean).reshape(shape)) * scale, weight, bias, shape).astype(site.dtype)
    over = (0, *range(2, x.ndim))
    out, mean, var = _normalized(work, over, eps)
    out = _affine(out, weight, bias, shape).astype(site.dtype)
    if not site.writes:
        return out
    return out, *_moved(x, running_mean, running_var, mean.reshape(-1), var.reshape(-1), momentum)


@lowers("F.instance_norm")
@updates
def instance_norm(
    site: Site,
    x,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
):
    """Normalization of each channel of each sample; a writing call returns the new running statistics too."""
    if not use_input_stats:
        out = batch_norm(site, x, running_mean, running_var, weight, bias, False, momentum, eps)
        return (out, running_mean, running_var) if site.writes else out
    over = tuple(range(2, x.ndim))
    out, mean, var = _normalized(wide(x), over, eps)
    out = _affine(out, weight, bias, _channels(x)).astype(site.dtype)
    if not site.writes:
        return out
    n = x.size // (x.shape[0] * x.shape[1])
    mean = lax.stop_gradient(mean.reshape(x.shape[:2]).mean(0))
    var = lax.stop_gradient(var.reshape(x.shape[:2]).mean(0)) * (n / max(n - 1, 1))
    return out, _running(running_mean, mean, momentum), _running(running_var, var, momentum)


@lowers("F.normalize")
def normalize(site: Site, x, p=2.0, dim=1, eps=1e-12, out=None):
    """`x / max(norm(x), eps)`."""
    if p != 2.0:
        return NotImplemented
    work = wide(x)
    length = euclidean(work, axes(dim, x.ndim))
    return (work / at_least(length, eps)).astype(site.dtype)


@lowers("F.cosine_similarity", "cosine_similarity")
def cosine_similarity(site: Site, x1, x2, dim=1, eps=1e-8):
    """The product of two directions; a length below `eps` counts as that, with the gradient of the length."""
    x1, x2 = jnp.broadcast_arrays(wide(x1.astype(site.dtype)), wide(x2.astype(site.dtype)))
    return jnp.sum(_direction(x1, dim, eps) * _direction(x2, dim, eps), dim)


def _direction(x, dim: int, eps: float):
    length = euclidean(x, axes(dim, x.ndim))
    return x / keep_gradient_of(jnp.maximum(length, eps), length)


_UNDECLARED = "it moves running statistics and does not say so by their versions"


@lowers("_batch_norm_with_update")
def batch_norm_with_update(site: Site, *args, **kwargs):
    """For inference over modules in training; JAX has no use of what it reserves for its backward."""
    raise unsupported(site, _UNDECLARED)


@lowers("native_batch_norm", "_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional")
def native_batch_norm(site: Site, x, weight, bias, running_mean, running_var, training, momentum, eps):
    """`(out, mean, rstd)`, and for the functional form the new running statistics."""
    if training and running_mean is not None and len(site.out) == 3:
        raise unsupported(site, _UNDECLARED)
    work, shape = wide(x), _channels(x)
    if not training:
        rstd = lax.rsqrt(wide(running_var) + eps)
        out = _affine((work - wide(running_mean).reshape(shape)) * rstd.reshape(shape), weight, bias, shape)
        results = (out, jnp.zeros((0,), out.dtype), jnp.zeros((0,), out.dtype))
        return (*results, running_mean, running_var)[: len(site.out)]
    out, mean, var = _normalized(work, (0, *range(2, x.ndim)), eps)
    mean, var = mean.reshape(-1), var.reshape(-1)
    results = (_affine(out, weight, bias, shape), mean, lax.rsqrt(var + eps))
    if len(site.out) == 3:
        return results
    return *results, *_moved(x, running_mean, running_var, mean, var, momentum)


@lowers("aten::_native_batch_norm_legit_no_training")
def native_batch_norm_no_training(site: Site, x, weight, bias, running_mean, running_var, momentum, eps):
    """`(out, mean, rstd)` in evaluation."""
    return native_batch_norm(site, x, weight, bias, running_mean, running_var, False, momentum, eps)
