"""`flex_attention`: scores, changed and masked by the user's functions of one score, and a softmax."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from torch import fx

from pure_backend.jax_bridge.lowerings.registry import Site, lowers


@lowers("hop::flex_attention")
def flex_attention(site: Site, query, key, value, score_mod, block_mask, scale, kernel_options, *buffers):
    """Torch's reference: every score is computed, whatever blocks the mask leaves out.

    Returns:
        The attention, and for each row the logarithm of its sum of exponentials and its largest score, both to the base 2.
    """
    return _attention(site, query, key, value, scale, *buffers)


@lowers("hop::flex_attention_backward")
def flex_attention_backward(site: Site, query, key, value, out, lse, grad_out, grad_lse, *rest):
    """The gradients of the query, the key and the value."""
    _, _, _, scale, _, *buffers = rest

    def forward(query, key, value):
        return _attention(site, query, key, value, scale, *buffers)[:2]

    _, vjp = jax.vjp(forward, query, key, value)
    return (*vjp((grad_out, jnp.zeros_like(lse) if grad_lse is None else grad_lse)), ())


def _attention(site: Site, query, key, value, scale, score_buffers, mask_buffers):
    score_gm, mask_gm = site.bodies
    groups = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, groups, axis=1) for x in (key, value))
    key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
    precision = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    scores = jnp.einsum("bhmd,bhnd->bhmn", query, key).astype(precision) * scale
    scores = _for_each_score(site, score_gm, score_buffers)(scores, *_places(scores.shape))
    kept = _for_each_score(site, mask_gm, mask_buffers, scored=False)(*_places(scores.shape))
    return _softmax(scores, jnp.broadcast_to(kept, scores.shape), value, query.dtype)


def _softmax(scores: jax.Array, kept: jax.Array, value: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted values, and each row's log-sum-exp and maximum; a row without any score gives 0, -inf and -inf."""
    kept &= scores != -jnp.inf  # a score_mod may mask too
    some = jnp.any(kept, axis=-1)
    largest = jax.lax.stop_gradient(jnp.max(jnp.where(kept, scores, -jnp.inf), axis=-1))
    # Where a row is empty, numbers that stay finite: a gradient of 0 times infinity would be NaN.
    shift = jnp.where(some, largest, 0)[..., None]
    weights = jnp.where(kept, jnp.exp(jnp.where(kept, scores, shift) - shift), 0)
    total = jnp.where(some, jnp.sum(weights, axis=-1), 1)
    lse = jnp.where(some, jnp.log(total) + shift[..., 0], -jnp.inf)
    attention = jnp.einsum("bhmn,bhnd->bhmd", (weights / total[..., None]).astype(dtype), value)
    return attention, lse / math.log(2), largest / math.log(2)


def _places(shape: tuple[int, ...]) -> list[jax.Array]:
    """Batch, head, query and key position."""
    return [jnp.arange(n, dtype=jnp.int32) for n in shape]


def _for_each_score(site: Site, gm: fx.GraphModule, buffers: tuple, scored: bool = True):
    """The user's function of one score, over all of them."""

    def one(*args):
        return site.body(gm, [*args, *buffers])[0]

    function = one
    for axis in (3, 2, 1, 0):
        first = (0,) if scored else ()
        function = jax.vmap(function, in_axes=(*first, *(0 if i == axis else None for i in range(4))))
    return function
