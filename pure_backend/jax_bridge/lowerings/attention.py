"""Scaled dot-product attention."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import softmax, wide


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
    weights = _softmax(*_masked(scores, attn_mask, is_causal, heads))
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
    """Scores with the mask applied, and whether each row has one that may be attended (None: all rows)."""
    if is_causal:  # every row has its first key; torch takes no mask beside it
        return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf), None
    if attn_mask is None:
        return scores, None
    if attn_mask.ndim > 2 and scores.ndim > len(heads) + 2:  # grouped heads
        attn_mask = jnp.broadcast_to(attn_mask, (*heads, *attn_mask.shape[-2:]))
        attn_mask = attn_mask.reshape(*scores.shape[:-2], *attn_mask.shape[-2:])
    if attn_mask.dtype == jnp.bool_:
        scores = jnp.where(attn_mask, scores, -jnp.inf)
        return scores, jnp.any(attn_mask, axis=-1, keepdims=True)
    scores = scores + attn_mask.astype(scores.dtype)
    return scores, ~jnp.all(jnp.isneginf(scores), axis=-1, keepdims=True)


def _softmax(scores, rows):
    """Softmax of the scores, and zeros in rows without any."""
    if rows is None:
        return softmax(scores, -1)
    rows = jnp.broadcast_to(rows, scores.shape)
    weights = softmax(jnp.where(rows, scores, 0), -1)
    return jax.lax.select(rows, weights, jnp.zeros_like(weights))
