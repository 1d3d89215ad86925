"""The fused transformer operators that `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call in evaluation."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings.activations import gelu
from pure_backend.jax_bridge.lowerings.normalization import layer_norm
from pure_backend.jax_bridge.lowerings.registry import Site, lowers

_SRC_MASK, _PADDING_MASK = 0, 1


def _blocked(mask, mask_type):
    """A bool mask, true where a key may not be seen, as `bool[batch | 1, heads | 1, L | 1, S]`; None for no mask."""
    if mask is None:
        return None
    if mask_type == _PADDING_MASK and mask.ndim == 2:
        return mask[:, None, None, :]
    return mask if mask.ndim == 4 else mask[None, None] if mask.ndim == 2 else mask[:, None]


def _attention(query, key, value, heads: int, qkv_weight, qkv_bias, proj_weight, proj_bias, blocked):
    """Multi-head attention of `f[batch, L, embed]` with packed projections; `(out, weights: f[batch, heads, L, S])`."""
    weights, biases = jnp.split(qkv_weight, 3), jnp.split(qkv_bias, 3)
    q, k, v = (
        (jnp.einsum("bld,ed->ble", x, w) + b).reshape(*x.shape[:2], heads, -1)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    scores = jnp.einsum("blhd,bshd->bhls", q, k) / math.sqrt(q.shape[-1])
    scores = scores if blocked is None else jnp.where(blocked, -jnp.inf, scores)
    attention = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bhls,bshd->blhd", attention, v).reshape(*query.shape[:2], -1)
    return jnp.einsum("bld,ed->ble", out, proj_weight) + proj_bias, attention


@lowers("_native_multi_head_attention", "aten::_native_multi_head_attention")
def native_multi_head_attention(
    site: Site,
    query,
    key,
    value,
    embed_dim,
    num_head,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    mask=None,
    need_weights=True,
    average_attn_weights=True,
    mask_type=None,
):
    """`(out, weights)`; the weights are averaged over heads if asked for, else empty."""
    out, weights = _attention(
        query, key, value, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, _blocked(mask, mask_type)
    )
    if not need_weights:
        return out, None if site.out[1] is None else jnp.zeros(tuple(site.out[1].shape), out.dtype)
    return out, weights.mean(1) if average_attn_weights else weights


@lowers("_transformer_encoder_layer_fwd", "aten::_transformer_encoder_layer_fwd")
def transformer_encoder_layer(
    site: Site,
    src,
    embed_dim,
    num_heads,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    use_gelu,
    norm_first,
    eps,
    norm_weight_1,
    norm_bias_1,
    norm_weight_2,
    norm_bias_2,
    ffn_weight_1,
    ffn_bias_1,
    ffn_weight_2,
    ffn_bias_2,
    mask=None,
    mask_type=None,
):
    """One encoder layer: attention and feed-forward, each with its residual and norm before or after."""
    site = dataclasses.replace(site, writes=())

    def norm(x, weight, bias):
        return layer_norm(site, x, (embed_dim,), weight, bias, eps)

    def attend(x):
        blocked = _blocked(mask, mask_type)
        return _attention(x, x, x, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, blocked)[0]

    def feed_forward(x):
        hidden = jnp.einsum("bld,ed->ble", x, ffn_weight_1) + ffn_bias_1
        hidden = gelu(hidden) if use_gelu else jax.nn.relu(hidden)
        return jnp.einsum("bld,ed->ble", hidden, ffn_weight_2) + ffn_bias_2

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)
