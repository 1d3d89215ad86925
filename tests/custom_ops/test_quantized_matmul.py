"""The int8 linear layer against its reference and a layer with the weights it stands for."""

import jax
import numpy as np
import pytest
import torch
from kernel_oracle import agrees_with_reference, as_array

from pure_backend.custom_ops.quantized_matmul import quantize_reference, quantized_matmul, quantized_matmul_reference
from pure_backend.inspect import compile_for_tpu


def tensors(rows, size, out, dtype=torch.float32):
    weight, scale = (torch.from_numpy(np.array(part)) for part in quantize_reference(as_array(torch.randn(out, size))))
    return torch.randn(*rows, size).to(dtype), weight, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, size, out", [((3,), 64, 40), ((2, 17), 256, 200), ((600,), 1024, 640), ((), 100, 3)])
def test_values_and_gradients(rows, size, out, dtype, device):
    agrees_with_reference(
        quantized_matmul, quantized_matmul_reference, tensors(rows, size, out, dtype), device=device, compiled=True
    )


def test_quantized_weights_are_near():
    weight, x = torch.randn(64, 128), torch.randn(5, 128)
    int8, scale = (torch.from_numpy(np.array(part)) for part in quantize_reference(as_array(weight)))
    assert int8.abs().amax(1).tolist() == [127] * 64
    torch.testing.assert_close(int8 * scale[:, None], weight, rtol=0, atol=float(scale.max()) / 2 + 1e-6)
    torch.testing.assert_close(quantized_matmul(x, int8, scale), x @ weight.T, rtol=0.1, atol=0.5)
    assert quantize_reference(as_array(torch.zeros(1, 4)))[0].tolist() == [[0] * 4]


def test_no_rows():
    x, weight, scale = tensors((0,), 64, 40)
    assert quantized_matmul(x, weight, scale).shape == (0, 40)


def test_what_is_refused():
    x, weight, scale = tensors((3,), 64, 40)
    for args, message in (
        ((x.double(), weight, scale), "argument 'x' is float64; TPU kernels compute"),
        ((x, weight.float(), scale), r"argument 'weight' is float32\[40, 64\], expected int8\[out, in\]: quantize it"),
        ((x[:, :8], weight, scale), r"argument 'x' has shape \(3, 8\), expected \(3, 64\)"),
        ((x, weight, scale[:3]), r"argument 'scale' has shape \(3,\), expected \(40,\): one scale for each output channel"),
        (tensors((1,), 5000, 4), "the second size of argument 'weight' is 5000: pad it to a multiple of 128"),
        (tensors((1,), 4, 5000), "the first size of argument 'weight' is 5000: pad it to a multiple of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_matmul(*args)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_through_mosaic(dtype, topology):
    for rows, size, out in ((3, 64, 40), (17, 256, 200), (600, 1024, 640), (5, 100, 3), (1, 4096, 11008), (64, 4000, 4000)):
        shapes = ((rows, size), dtype), ((out, size), "int8"), ((out,), "float32")
        args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        for backward in (False, True):
            program = compile_for_tpu(quantized_matmul, *args, topology=topology, backward=backward)
            assert len(program.kernels) == 1, (rows, size, out, backward)
            moved = [copy for copy in program.copies if copy.shape.startswith("s8") and copy.space == 0]
            assert backward or not moved, moved  # the gradient of the scales wants them transposed
