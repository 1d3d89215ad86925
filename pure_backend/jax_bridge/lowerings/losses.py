"""Loss functions whose ATen form loses precision or shape; the others go through their decomposition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings import places
from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import wide


def _reduced(loss, reduction: str):
    return {"none": lambda: loss, "sum": lambda: jnp.sum(loss), "mean": lambda: jnp.mean(loss)}[reduction]()


@lowers("F.mse_loss")
def mse_loss(site: Site, x, target, size_average=None, reduce=None, reduction="mean", weight=None):
    """Mean squared error."""
    if weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    return _reduced(jnp.square(wide(x.astype(site.dtype)) - wide(target.astype(site.dtype))), reduction)


@lowers("F.cross_entropy")
def cross_entropy(
    site: Site,
    x,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """Cross entropy of class indices; class probabilities and smoothed labels are decomposed."""
    if label_smoothing or not jnp.issubdtype(target.dtype, jnp.integer) or size_average is not None or reduce is not None:
        return NotImplemented
    logits = jax.nn.log_softmax(wide(x), axis=min(1, x.ndim - 1))
    return _nll(logits, target, weight, ignore_index, reduction)


@lowers("F.nll_loss", "F.nll_loss_nd")
def nll_loss(site: Site, x, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """Negative log likelihood of class indices."""
    if size_average is not None or reduce is not None:
        return NotImplemented
    return _nll(wide(x), target, weight, ignore_index, reduction)


def _nll(logits, target, weight, ignore_index: int, reduction: str):
    """`-logits[target]`, ignored targets left out; `logits: f[batch, classes, ...]` or `f[classes]`."""
    axis = min(1, logits.ndim - 1)
    counted = target != ignore_index
    index = jnp.where(counted, target, 0)
    picked = places.read_along(logits, jnp.expand_dims(index, axis), axis).squeeze(axis)
    scale = counted.astype(logits.dtype)
    if weight is not None:
        scale = jnp.where(counted, places.read(wide(weight), index), 0)
    loss = jnp.where(counted, -picked * scale, 0)
    if reduction == "none":
        return loss
    return jnp.sum(loss) if reduction == "sum" else jnp.sum(loss) / jnp.sum(scale)
