"""Loss functions whose ATen form loses precision or shape; the others go through their decomposition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings import places
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, unsupported
from pure_backend.jax_bridge.lowerings.values import wide


def _reduced(loss, reduction: str):
    return {"none": lambda: loss, "sum": lambda: jnp.sum(loss), "mean": lambda: jnp.mean(loss)}[reduction]()


@lowers("F.mse_loss")
def mse_loss(site: Site, x, target, size_average=None, reduce=None, reduction="mean", weight=None):
    """Mean squared error."""
    if weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    return _reduced(jnp.square(wide(x.astype(site.dtype)) - wide(target.astype(site.dtype))), reduction)


@lowers("F.binary_cross_entropy_with_logits", "binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    site: Site, x, target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None
):
    """Cross entropy of probabilities `sigmoid(x)`."""
    if not isinstance(reduction, str) or isinstance(size_average, jax.Array) or size_average is not None or reduce is not None:
        return NotImplemented
    x, target = wide(x), wide(target)
    loss = _logistic_loss(x, target) if pos_weight is None else _weighted_logistic_loss(x, target, wide(pos_weight))
    return _reduced(loss if weight is None else loss * wide(weight), reduction)


@jax.custom_jvp
def _logistic_loss(x, target):
    """`-log(sigmoid(x))` and `-log(1 - sigmoid(x))`, by how likely they are."""
    return (1 - target) * x + (jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(-x, 0))


@_logistic_loss.defjvp
def _(primals, tangents):
    x, target = primals
    return _logistic_loss(x, target), tangents[0] * (jax.nn.sigmoid(x) - target) - tangents[1] * x


@jax.custom_jvp
def _weighted_logistic_loss(x, target, positive):
    """The same with the first of the two weighted."""
    scale = 1 + (positive - 1) * target
    return (1 - target) * x + scale * (jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(-x, 0))


@_weighted_logistic_loss.defjvp
def _(primals, tangents):
    x, target, positive = primals
    right, wrong = jax.nn.log_sigmoid(x), jax.nn.log_sigmoid(-x)
    by_x = (1 + (positive - 1) * target) * jax.nn.sigmoid(x) - positive * target
    by_target = wrong - positive * right
    return _weighted_logistic_loss(*primals), tangents[0] * by_x + tangents[1] * by_target - tangents[2] * (target * right)


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


@lowers("aten::smooth_l1_loss_backward")
def smooth_l1_loss_backward(site: Site, grad, x, target, reduction, beta):
    """The gradient of its first argument; NaN where the difference is."""
    gap = wide(x) - wide(target)
    slope = jnp.where(gap <= -beta, -1, jnp.where(gap >= beta, 1, gap / beta))
    return grad * slope / (gap.size if _REDUCTIONS[reduction] == "mean" else 1)


@lowers("aten::multi_margin_loss")
def multi_margin_loss(site: Site, x, target, p=1, margin=1, weight=None, reduction=1):
    """Hinge loss of class indices: `x: f[classes]` or `f[batch, classes]`."""
    rows, target = wide(jnp.atleast_2d(x)), target.reshape(-1)
    own = jnp.arange(rows.shape[1]) == target[:, None]
    margins = margin - jnp.take_along_axis(rows, target[:, None], 1) + rows
    scale = 1 if weight is None else wide(weight)[target][:, None]
    margins = jnp.where((margins > 0) & ~own, margins, 0)
    loss = jnp.sum(margins**p * scale, 1) / rows.shape[1]
    return _reduced(loss, _REDUCTIONS[reduction]).reshape(tuple(site.out.shape))


@lowers("aten::multilabel_margin_loss_forward")
def multilabel_margin_loss(site: Site, x, target, reduction):
    """Hinge loss between the classes listed in `target`, up to the first -1, and all others; and which classes are listed."""
    if x.ndim == 1 and _REDUCTIONS[reduction] == "none":
        raise unsupported(site, "torch's fake tensors give its result another shape than eager does")
    rows, labels = wide(jnp.atleast_2d(x)), jnp.atleast_2d(target)
    listed = jnp.cumsum(labels < 0, 1) == 0
    own = jnp.any(jax.nn.one_hot(labels, rows.shape[1], dtype=bool) & listed[..., None], 1)
    margins = 1 - jnp.take_along_axis(rows, jnp.maximum(labels, 0), 1)[..., None] + rows[:, None]
    counted = (margins > 0) & listed[..., None] & ~own[:, None]
    loss = jnp.sum(jnp.where(counted, margins, 0), (1, 2)) / rows.shape[1]
    return _reduced(loss, _REDUCTIONS[reduction]).reshape(tuple(site.out[0].shape)), own.astype(x.dtype).reshape(x.shape)


_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
