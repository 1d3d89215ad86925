"""Group H of the cases: DLPack, devices, threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, both_raise, compiled
from torch import nn

import pure_backend

LAYOUTS = {
    "transpose": lambda b: b.transpose(0, 2),
    "step": lambda b: b[:, ::2],
    "last": lambda b: b[..., 1],
    "expand": lambda b: b.expand(2, 3, 4),
    "stride 0": lambda b: b[:, :1].expand(2, 3, 4),
    "flip": lambda b: b.flip(1),
    "permute": lambda b: b.to(memory_format=torch.contiguous_format).permute(1, 2, 0),
    "offset and transpose": lambda b: b[0].t()[1:],
    "conj": lambda b: b.to(torch.complex64).mul(1 + 2j).conj(),
    "neg": lambda b: b.to(torch.complex64).mul(1 + 2j).conj().imag,
    "scalar with offset": lambda b: b[1, 2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_h01_strided_inputs(name, device):
    """H01 https://github.com/jax-ml/jax/issues/17784"""

    def make_args():
        return (LAYOUTS[name](torch.arange(24.0).reshape(2, 3, 4)),)

    agree(lambda x: (x * 1, x[0], x.reshape(-1)), make_args, device=device)


def test_h01_channels_last(device):
    """H01 https://github.com/jax-ml/jax/issues/7657"""

    def make_args():
        x = torch.linspace(-1, 1, 2 * 3 * 5 * 5).reshape(2, 3, 5, 5).to(memory_format=torch.channels_last)
        w = torch.linspace(-1, 1, 4 * 3 * 3 * 3).reshape(4, 3, 3, 3).to(memory_format=torch.channels_last)
        return x.requires_grad_(), w.requires_grad_()

    agree(F.conv2d, make_args, device=device, grad=True, tol=1e-4, pure=True)


COTANGENTS = {
    "expanded": lambda y: y.sum(),
    "transposed": lambda y: (y.t() * torch.arange(6.0, device=y.device).reshape(2, 3)).sum(),
    "strided": lambda y: y[::2, 1].sum(),
}


@pytest.mark.parametrize("name", COTANGENTS)
def test_h01_strided_cotangents(name, device):
    """H01 https://github.com/samuela/torch2jax/issues/6"""
    f, grads = (lambda x: x.sin() * 2), []
    for call, where in ((f, "cpu"), (compiled(f), device)):
        x = torch.arange(6.0).reshape(3, 2).to(where).requires_grad_()
        COTANGENTS[name](call(x)).backward()
        grads.append(x.grad.cpu())
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("shape", [(3, 1, 6, 2), (1, 5), (4, 1), (1, 1, 1), (2, 1, 1, 3)], ids=str)
def test_h02_size_one_dimensions(shape, device):
    """H02 https://github.com/jax-ml/jax/issues/25066"""

    def make_args():
        return (torch.ones(shape), torch.ones(shape).transpose(0, -1).contiguous())

    agree(lambda a, b: a + b.sum(), make_args, device=device)


def test_h03_bool(device):
    """H03 https://github.com/jax-ml/jax/issues/19352"""

    def f(m, x):
        return (~m, torch.where(m, x, -x), m.sum())

    got = agree(f, lambda: (torch.tensor([True, False]), torch.ones(2)), device=device, pure=True)
    assert [x.tolist() for x in got.outputs] == [[False, True], [1, -1], 1]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("shape", [(3,), ()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_h03_every_dtype_comes_and_goes(dtype, shape, device):
    """H03 https://github.com/pytorch/pytorch/issues/114673"""
    wide = torch.complex64 if dtype.is_complex else torch.float32

    def f(x):
        return (x.clone(), x.to(wide) * 2, (x.to(wide) + 1).to(dtype))

    def make_args():
        return (torch.tensor([0.0, 1.0, 3.0])[: 3 if shape else 1].reshape(shape).to(dtype),)

    got = agree(f, make_args, device=device)
    assert got.outputs[0].dtype == dtype


def test_h12_threads():
    """H12 https://github.com/jax-ml/jax/issues/1037"""
    c = compiled(lambda x: (x @ x).sin())

    def go(i):
        x = torch.full((8, 8), i / 100.0, requires_grad=True)
        c(x).sum().backward()
        return x.grad

    go(0)
    with ThreadPoolExecutor(8) as pool:
        parallel = list(pool.map(go, range(16)))
    for i, grad in enumerate(parallel):
        torch.testing.assert_close(grad, go(i))
    assert pure_backend.statistics().traces == 1
    assert pure_backend.statistics().lowerings == 2


def test_h12_first_compile_in_many_threads():
    """H12 https://github.com/jax-ml/jax/issues/21650"""
    c = compiled(lambda x: (x * 2).cos())

    def go(i):
        x = torch.full((3,), float(i), requires_grad=True)
        c(x).sum().backward()
        return x.grad

    with ThreadPoolExecutor(8) as pool:
        for i, grad in enumerate(pool.map(go, range(16))):
            torch.testing.assert_close(grad, -2 * torch.full((3,), 2.0 * i).sin())


def test_h13_zero_size(device):
    """H13 https://github.com/pytorch/xla/issues/8610"""

    def f(x, i):
        return (x.sum(1), x.cumsum(1), torch.gather(x, 1, i), torch.cat([x, x]), x @ x.T, x.mean(1))

    def make_args():
        return (torch.ones(2, 0, requires_grad=True), torch.zeros(2, 0, dtype=torch.int64))

    got = agree(f, make_args, device=device, grad=True)
    assert got.outputs[5].isnan().all()
    assert got.grads["argument[0]"].shape == (2, 0)


def test_h13_zero_d(device):
    """H13 https://github.com/pytorch/xla/issues/3061"""

    def f(s):
        return (s.log_softmax(0), s.sort(0), s.max(0), s.cumsum(0))

    agree(f, lambda: (torch.tensor(3.0),), device=device)


def test_h13_max_of_nothing_raises(device):
    """H13 https://github.com/pytorch/xla/issues/880"""
    both_raise(lambda x: x.max(), lambda: (torch.ones(0),), device=device)


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.arange(4.0)
        self.d = {"w": torch.ones(4)}
        self.l = [torch.tensor(2.0)]

    def forward(self, x):
        made = torch.tensor([1.0, 2, 3, 4]) * self.d["w"] + torch.zeros(4)
        return x[torch.arange(x.shape[0]), self.t.long()] + made * self.l[0]


def test_h14_attributes_and_constructors():
    """H14 https://github.com/google/torchax/issues/23"""
    got = agree(Constants(), lambda: (torch.eye(4),), pure=True)
    assert got.outputs.tolist() == [3, 5, 7, 9]


def test_h14_zero_d_cpu_tensors_beside_the_device(device):
    """H14 https://github.com/pytorch/xla/issues/9644 (0-d CPU tensors go with any device)"""
    two = torch.tensor(2.0)

    def f(x):
        return x * two + torch.tensor(1.5) + torch.full((), 0.5) + torch.arange(4, device=x.device)

    got = agree(f, lambda: (torch.ones(4),), device=device, pure=True)
    assert got.outputs.tolist() == [4, 5, 6, 7]
