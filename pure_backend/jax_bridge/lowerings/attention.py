"""Scaled dot-product attention."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import wide


@lowers("F.scaled_dot_product_attention", "aten::scaled_dot_product_attention")
def scaled_dot_product_attention(
    site: Site,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """Attention of `query: f[..., heads, L, d]` over `key, value: f[..., heads, S, d]`.

    A row whose keys are all masked gives zeros, as torch has done since 2.5 (pytorch issue 103749), not NaN. With
    `enable_gqa` the key heads are shared by a group of query heads, without being copied.
    """
    heads = query.shape[:-2]
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        query = query.reshape(*query.shape[:-3], key.shape[-3], -1, *query.shape[-2:])
        key, value = key[..., None, :, :], value[..., None, :, :]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...ld,...sd->...ls", wide(query), wide(key)) * scale
    scores, allowed = _masked(scores, attn_mask, is_causal, heads)
    weights = _safe_softmax(scores, allowed)
    if dropout_p > 0:
        keep = jax.random.bernoulli(site.keys.next(), 1 - dropout_p, weights.shape)
        weights = jnp.where(keep, weights / (1 - dropout_p), 0)
    out = jnp.einsum("...ls,...sd->...ld", weights.astype(value.dtype), value)
    return out.reshape(tuple(site.out.shape)).astype(site.dtype)


@lowers("aten::_scaled_dot_product_flash_attention_for_cpu")
def flash_attention_for_cpu(site: Site, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """What torch decomposes attention into on CPU: `(out, logsumexp)`; the second is for its own backward only."""
    whole = dataclasses.replace(site, out=site.out[0])
    out = scaled_dot_product_attention(whole, query, key, value, attn_mask, dropout_p, is_causal, scale)
    return out, jnp.zeros(tuple(site.out[1].shape), jnp.float32)


def _masked(scores, attn_mask, is_causal: bool, heads):
    """Scores with the mask applied, and whether each may be attended (None: all of them)."""
    allowed = None
    if is_causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is not None:
        if attn_mask.ndim > 2 and scores.ndim > len(heads) + 2:  # grouped heads
            attn_mask = jnp.broadcast_to(attn_mask, (*heads, *attn_mask.shape[-2:]))
            attn_mask = attn_mask.reshape(*scores.shape[:-2], *attn_mask.shape[-2:])
        if attn_mask.dtype == jnp.bool_:
            allowed = attn_mask
        else:
            scores = scores + attn_mask.astype(scores.dtype)
            allowed = ~jnp.isneginf(scores)
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    return scores, allowed


def _safe_softmax(scores, allowed):
    if allowed is None:
        return jax.nn.softmax(scores, axis=-1)
    any_allowed = jnp.any(allowed, axis=-1, keepdims=True)
    finite = jnp.where(any_allowed, scores, 0)
    top = lax.stop_gradient(jnp.max(finite, axis=-1, keepdims=True))
    weights = jnp.exp(finite - top)
    return jnp.where(any_allowed, weights / jnp.sum(weights, axis=-1, keepdims=True), 0)
