"""Attention in blocks against its reference and torch's own."""

import jax
import pytest
import torch
from kernel_oracle import agrees_with_reference

from pure_backend.custom_ops.flash_attention import flash_attention, flash_attention_reference
from pure_backend.inspect import compile_for_tpu


def tensors(batch, heads, kv_heads, seq, kv_seq, dim, dtype=torch.float32):
    q, k, v = ((batch, heads, seq, dim), *[(batch, kv_heads, kv_seq, dim)] * 2)
    return [torch.randn(shape).to(dtype) for shape in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes, causal, scale",
    [
        ((2, 4, 2, 5, 5, 16), True, None),
        ((1, 2, 2, 130, 300, 32), False, 0.3),
        ((1, 3, 1, 300, 140, 80), True, None),
    ],
)
def test_values_and_gradients(sizes, causal, scale, dtype, device):
    agrees_with_reference(flash_attention, flash_attention_reference, tensors(*sizes, dtype), causal, scale, device=device)


def test_many_blocks():
    """Blocks of 512: 3 by 3 of them, and queries that start in one block of keys and end in another."""
    agrees_with_reference(
        flash_attention, flash_attention_reference, tensors(1, 4, 2, 1500, 1500, 32), True, None, device=torch.device("cpu")
    )


def test_compiled():
    agrees_with_reference(
        flash_attention,
        flash_attention_reference,
        tensors(1, 2, 1, 7, 7, 16),
        True,
        None,
        device=torch.device("cpu"),
        compiled=True,
    )


@pytest.mark.parametrize("kv_seq", [33, 300])
def test_torch_computes_the_same(kv_seq):
    """Also with keys that no query sees: their gradient is zero."""
    given = [t.requires_grad_() for t in tensors(2, 4, 2, 33, kv_seq, 16)]
    want = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    got = flash_attention(*given)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.sin().sum(), given), torch.autograd.grad(want.sin().sum(), given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_large_scores():
    """The maximum is subtracted before the exponential."""
    q, k, v = tensors(1, 1, 1, 140, 140, 16)
    want = torch.nn.functional.scaled_dot_product_attention(100 * q, 100 * k, v, is_causal=True)
    torch.testing.assert_close(flash_attention(100 * q, 100 * k, v), want, rtol=1e-4, atol=1e-4)


def test_what_is_refused():
    q, k, v = tensors(2, 4, 2, 8, 8, 16)
    for args, message in (
        ((q[0], k, v), r"argument 'q' has shape \(4, 8, 16\), expected \[batch, heads, seq, dim\]"),
        ((q.double(), k.double(), v.double()), "argument 'q' is float64; TPU kernels compute in float32 or bfloat16"),
        ((q, k.bfloat16(), v), "argument 'k' is bfloat16, 'q' is float32: convert one"),
        ((q, k[:1], v), r"argument 'k' has shape \(1, 2, 8, 16\), expected \(2, 2, 8, 16\)"),
        ((q, k, v[:, :, :4]), "argument 'v' has shape .*: the shape of 'k'"),
        ((q[:, :3], k, v), "argument 'q' has 3 heads, no multiple of the 2 of 'k'"),
        (tensors(1, 1, 1, 4, 4, 512), "argument 'q' has dim 512, at most 256 fits"),
        (tensors(1, 1, 1, 0, 4, 16), "none of them 0"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attention(*args)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_through_mosaic(dtype, topology):
    for heads, kv_heads, seq, kv_seq, dim, causal in (
        (4, 2, 5, 5, 16, True),
        (8, 2, 2048, 2048, 128, True),
        (3, 1, 300, 140, 64, False),
        (1, 1, 640, 640, 256, True),
    ):
        q, k = jax.ShapeDtypeStruct((1, heads, seq, dim), dtype), jax.ShapeDtypeStruct((1, kv_heads, kv_seq, dim), dtype)
        forward = compile_for_tpu(flash_attention, q, k, k, causal, topology=topology)
        backward = compile_for_tpu(flash_attention, q, k, k, causal, topology=topology, backward=True)
        assert len(forward.kernels) == 1 and len(backward.kernels) == 3  # the forward again, dq, and dk with dv
