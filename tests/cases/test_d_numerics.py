"""Group D of the cases: dtypes, numerics, semantics of single operators."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import agree, compiled
from torch import nn


@pytest.fixture
def float64_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_d01_python_float_keeps_the_dtype(dtype, device):
    """D01 https://github.com/google/torchax/issues/31"""

    def f(x):
        return x + 1.0, 2 * x, x / 3, x**2, torch.where(x > 0, x, 0.5), x.clamp(min=0.1), x.mean() * 1e-3

    got = agree(f, lambda: (torch.linspace(-1, 1, 7).to(dtype),), device=device, tol=1e-2, pure=True)
    assert {x.dtype for x in got.outputs} == {dtype}


MIXED = {
    "int + float": (lambda x, y: (x + 1.5, 2.0 * x, x / 2, x**0.5), torch.int64, torch.int64, torch.float32),
    "int / int": (lambda x, y: (x / y, x.true_divide(y)), torch.int32, torch.int64, torch.float32),
    "bool + bool": (lambda x, y: (x + y, x | y, x * y), torch.bool, torch.bool, torch.bool),
    "bool + int": (lambda x, y: (x + 1, x * 2, x + y), torch.bool, torch.int64, torch.int64),
    "0-d int + n-d float": (lambda x, y: (x + y[0], y[0] * x), torch.float16, torch.int64, torch.float16),
    "0-d float + n-d int": (lambda x, y: (x + y[0], x * y[0]), torch.int64, torch.float16, torch.float16),
    "0-d f32 + n-d bf16": (lambda x, y: (x + y[0], x / y[0]), torch.bfloat16, torch.float32, torch.bfloat16),
    "n-d f32 + n-d bf16": (lambda x, y: (x + y, x / y), torch.bfloat16, torch.float32, torch.float32),
    "uint8 + int8": (lambda x, y: (x + y, x * y), torch.uint8, torch.int8, torch.int16),
    "numpy scalar": (
        lambda x, y: (x + np.float64(1.5), x * np.float32(2.0)),
        torch.float32,
        torch.int64,
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_d01_promotion(name, device):
    """D01 https://github.com/pytorch/xla/issues/1929"""
    f, dx, dy, want = MIXED[name]
    got = agree(f, lambda: (torch.tensor([0, 1, 3]).to(dx), torch.tensor([1, 1, 2]).to(dy)), device=device, tol=1e-2)
    assert {x.dtype for x in got.outputs} == {want}


ZERO_D = {
    "sub": lambda x, d: x - d,
    "rsub": lambda x, d: d - x,
    "mul": lambda x, d: x * d,
    "div": lambda x, d: x / d,
    "where": lambda x, d: torch.where(x > 0, x, d),
    "maximum": torch.maximum,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ZERO_D)
def test_d02_zero_d_float64(name, grad, device):
    """D02 https://github.com/Lightning-AI/lightning-thunder/issues/1239"""

    def make_args():
        return (torch.ones(3, requires_grad=grad), torch.tensor(2.0, dtype=torch.float64))

    got = agree(ZERO_D[name], make_args, device=device, grad=grad)
    assert got.outputs.dtype == torch.float32
    if name == "sub":
        assert got.outputs.tolist() == [-1, -1, -1]


def scaled(x):
    return x * 2.0, x + torch.tensor(2.0), x.float().mul(torch.tensor(3))


def test_d03_int_times_float(device):
    """D03 https://github.com/pytorch/pytorch/issues/74400"""
    got = agree(scaled, lambda: (torch.arange(3),), device=device)
    assert {x.dtype for x in got.outputs} == {torch.float32}
    assert got.outputs[1].tolist() == [2, 3, 4]


def test_d03_int_times_float_with_float64_default(device, float64_default):
    """D03 https://github.com/pytorch/pytorch/issues/74400 (the default dtype is float64)"""
    got = agree(scaled, lambda: (torch.arange(3),), device=device)
    assert [x.dtype for x in got.outputs] == [torch.float64, torch.float64, torch.float32]


class AutocastNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.net(x)


def image() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8)


@pytest.mark.parametrize("train", [True, False])
def test_d06_autocast_conv_then_batch_norm(train, device):
    """D06 https://github.com/pytorch/xla/issues/8496"""
    if device.type == "xla":  # xla's autocast policy runs batch norm in f32: the lazy run is the oracle there
        net = AutocastNet().train(train).to(device)
        got, want = compiled(copy.deepcopy(net))(image().to(device)), net(image().to(device))
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=2e-2, atol=2e-2)
        return
    got = agree(AutocastNet().train(train), lambda: (image(),), device=device, tol=2e-2)
    assert got.outputs.dtype == torch.bfloat16


def autocast_mix(x, w):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        low = x @ w
        with torch.autocast(x.device.type, enabled=False):
            high = x @ w
    return low, low.float().softmax(-1), high, x @ w


def test_d06_autocast_regions(device):
    """D06 https://github.com/pytorch/xla/issues/7682 (nested and disabled regions, and after the region)"""

    def make_args():
        return (torch.eye(3, requires_grad=True), torch.arange(9.0).reshape(3, 3).requires_grad_())

    got = agree(autocast_mix, make_args, device=device, tol=2e-2, grad=True)
    assert [x.dtype for x in got.outputs] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]


def test_d08_int64_is_exact(device):
    """D08 https://github.com/jax-ml/jax/issues/18385"""

    def f(ids):
        return (ids + 1, ids * 3, ids.sum(), torch.arange(3, device=ids.device))

    got = agree(f, lambda: (torch.tensor([2**40, -(2**40), 5]),), device=device, pure=True)
    assert {x.dtype for x in got.outputs} == {torch.int64}
    assert got.outputs[0].tolist() == [2**40 + 1, -(2**40) + 1, 6]


INDICES = {
    "argmax": lambda x: (x.argmax(), x.argmax(1), x.argmin(0)),
    "topk": lambda x: x.topk(2, 1),
    "sort": lambda x: (*x.sort(1), x.argsort(0)),
    "cumsum": lambda x: (x.long().cumsum(1), (x > 0).cumsum(1), (x > 0).sum()),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0], device=x.device)),
    "searchsorted": lambda x: torch.searchsorted(x.sort(1).values, x),
    "max": lambda x: (*x.max(1), *x.min(0)),
    "nonzero": lambda x: (x > 0.5).nonzero(),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "cummax": lambda x: x.cummax(1),
    "median": lambda x: x.median(1),
}


@pytest.mark.parametrize("name", INDICES)
def test_d08_indices_are_int64(name, device):
    """D08 https://github.com/jax-ml/jax/issues/11895"""

    def make_args():
        return (torch.tensor([[0.3, -1.0, 2.0], [5.0, 0.7, -4.0]]),)

    got = agree(INDICES[name], make_args, device=device)
    tensors = [x for x in got.leaves.values() if isinstance(x, torch.Tensor)]
    assert {x.dtype for x in tensors} <= {torch.int64, torch.float32}
    assert torch.int64 in {x.dtype for x in tensors}


def test_d10_gradient_of_the_squared_modulus(device):
    """D10 https://github.com/jax-ml/jax/issues/9110"""
    z = torch.tensor([3 + 4j]).to(device).requires_grad_()
    compiled(lambda z: (z * z.conj()).real.sum())(z).backward()
    assert z.grad.tolist() == [6 + 8j]


def test_d10_complex_cotangent(device):
    """D10 https://github.com/jax-ml/jax/issues/15872"""
    w = torch.tensor([3 + 4j]).to(device).requires_grad_()
    compiled(lambda w: w * w)(w).backward(torch.tensor([1 + 0j], device=device))
    assert w.grad.tolist() == [6 - 8j]


COMPLEX = {
    "square": lambda x, z: (z * z * x[0, 0], z.abs(), z.angle()),
    "fft": lambda x, z: torch.fft.ifft(torch.fft.fft(x) * z).real,
    "rfft": lambda x, z: torch.fft.irfft(torch.fft.rfft(x).conj(), n=4),
    "rope": lambda x, z: torch.view_as_real(torch.view_as_complex(x.reshape(2, 2, 2)) * z[:2]).flatten(1),
    "complex": lambda x, z: torch.complex(x[0], x[1]) * z.conj(),
    "matmul": lambda x, z: (x.to(z.dtype) @ z, z.real * z.imag),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_d10_complex_inside(name, device):
    """D10 https://github.com/pytorch/pytorch/issues/41857 (real to complex to real, and complex leaves)"""

    def make_args():
        z = torch.tensor([1 + 2j, 0.5 - 1j, -1 + 0.3j, 2 + 2j], requires_grad=True)
        return torch.linspace(-1, 2, 8).reshape(2, 4).requires_grad_(), z

    agree(COMPLEX[name], make_args, device=device, grad=True, tol=1e-4)


def rope(x, ang):
    c = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(c * torch.polar(torch.ones_like(ang), ang)).flatten(-2).type_as(x)


def test_d11_rope_with_polar(device):
    """D11 https://github.com/pytorch/xla/issues/9215"""

    def make_args():
        return (
            torch.linspace(-1, 1, 48).sin().reshape(2, 3, 8).bfloat16().requires_grad_(),
            torch.linspace(0, 1, 12).reshape(3, 4),
        )

    got = agree(rope, make_args, device=device, tol=2e-2, grad=True)
    assert got.outputs.dtype == torch.bfloat16
    assert got.args[0].dtype == torch.bfloat16


def test_d11_type_as_leaves_its_receiver_alone(device):
    """D11 https://github.com/pytorch/xla/issues/9215 (`torchax.Tensor.type_as` changes the receiver)"""

    def f(x):
        h = x.float()
        return h.type_as(x), h, h * 1e-4

    got = agree(f, lambda: (torch.ones(3, dtype=torch.bfloat16),), device=device)
    assert [x.dtype for x in got.outputs] == [torch.bfloat16, torch.float32, torch.float32]


def test_d13_attention_rows_with_everything_masked(device):
    """D13 https://github.com/pytorch/pytorch/issues/103749"""

    def make_args():
        m = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
        m[..., 0, :] = False
        return torch.ones(1, 1, 3, 4, requires_grad=True), m

    def f(q, m):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=m)

    got = agree(f, make_args, device=device, grad=True)
    assert (got.outputs[0, 0, 0] == 0).all()
    assert all(grad is None or grad.isfinite().all() for grad in got.grads.values())


def heads(n, length, dtype=torch.float32) -> torch.Tensor:
    return torch.linspace(-2, 2, n * length * 4).sin().reshape(1, n, length, 4).to(dtype).requires_grad_()


ATTENTION = {
    "causal, longer keys": (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), 2, torch.float32),
    "grouped heads": (
        lambda q, k: F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], enable_gqa=True),
        2,
        torch.float32,
    ),
    "scale": (lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=0.3), 2, torch.float32),
    "float mask": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=torch.ones(3, 5, device=q.device).tril().log()),
        2,
        torch.float32,
    ),
    "bf16": (lambda q, k: F.scaled_dot_product_attention(q, k, k), 2, torch.bfloat16),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_d13_attention(name, device):
    """D13 https://github.com/pytorch/pytorch/issues/103963"""
    f, n, dtype = ATTENTION[name]
    tol = 1e-5 if dtype == torch.float32 else 2e-2
    agree(f, lambda: (heads(n, 3, dtype), heads(n, 5, dtype)), device=device, grad=True, tol=tol)
