"""RMS normalization against its reference and torch's own."""

import jax
import pytest
import torch
from kernel_oracle import agrees_with_reference

from pure_backend.custom_ops.rms_norm import rms_norm, rms_norm_reference
from pure_backend.inspect import compile_for_tpu

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 96), (7,), (1100, 130), (16, 128)])
def test_values_and_gradients(shape, dtype, device):
    x, weight = torch.randn(shape).to(dtype), 1 + torch.randn(shape[-1]) / 4
    agrees_with_reference(rms_norm, rms_norm_reference, (x, weight), 1e-5, device=device, compiled=True)


def test_torch_computes_the_same():
    x, weight = torch.randn(6, 40), torch.randn(40)
    torch.testing.assert_close(rms_norm(x, weight), torch.nn.functional.rms_norm(x, (40,), weight, 1e-6))


def test_no_rows():
    assert rms_norm(torch.zeros(0, 8), torch.ones(8)).shape == (0, 8)


def test_batched():
    x, weight = torch.randn(3, 4, 16), torch.randn(16)
    torch.testing.assert_close(torch.vmap(rms_norm, in_dims=(0, None))(x, weight), rms_norm(x, weight))


def test_what_is_refused():
    with pytest.raises(ValueError, match="argument 'x' is float64; TPU kernels compute in float32 or bfloat16: convert"):
        rms_norm(torch.ones(2, 8, dtype=torch.float64), torch.ones(8))
    with pytest.raises(ValueError, match=r"argument 'weight' has shape \(7,\), expected \(8,\): one weight"):
        rms_norm(torch.ones(2, 8), torch.ones(7))
    with pytest.raises(ValueError, match="last dimension of argument 'x' is 40000"):
        rms_norm(torch.ones(2, 40000), torch.ones(40000))


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_through_mosaic(dtype, topology):
    for shape in ((7,), (33, 130), (1000, 256), (64, 32768)):
        args = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], dtype)
        for backward in (False, True):
            program = compile_for_tpu(rms_norm, *args, topology=topology, backward=backward)
            assert len(program.kernels) == 1, (shape, backward)
