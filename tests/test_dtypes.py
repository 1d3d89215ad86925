"""Dtypes, sizes and layouts of inputs and outputs."""

import math

import pytest
import torch
from oracle import agree

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def values(dtype) -> torch.Tensor:
    return torch.tensor([[1.0, 2.0, 0.0], [3.0, 5.0, 1.0]]).to(dtype)


ARITHMETIC = {
    "add": lambda x, y: (x + y, x - y, x * y),
    "scalar": lambda x, y: (x + 1, x * 2, 3 - x, x // 2, x % 2, x**2),
    "float scalar": lambda x, y: (x * 0.5, x / 2, x + 1e-3),
    "compare": lambda x, y: (x > y, x == 1, x != y, x <= 2),
    "reduce": lambda x, y: (x.sum(), x.sum(1), x.prod(0), x.amax(1), x.cumsum(0), x.any(), x.all(1)),
    "unary": lambda x, y: (x.abs(), x.sign(), x.square(), x.clamp(1, 2), x.neg() if x.dtype != torch.uint8 else x),
    "to float": lambda x, y: (x.sqrt(), x.exp(), x.sin(), x.sigmoid(), x.log1p()),
    "convert": lambda x, y: (x.int(), x.long(), x.half(), x.double(), x.bool(), x.to(torch.bfloat16)),
    "build": lambda x, y: (
        torch.zeros_like(x),
        torch.full_like(x, 2),
        x.new_ones(2),
        torch.cat([x, y]),
        torch.stack([x, y]),
    ),
    "select": lambda x, y: (torch.where(x > y, x, y), torch.maximum(x, y), x.sort(1).values, x.flip(0), x.tril()),
    "matmul": lambda x, y: (x @ y.t(), torch.einsum("ij,kj->ik", x, y)),
    "mean": lambda x, y: (x.float().mean(), (x * 1.0).var(), x.count_nonzero()),
    "item-free 0-d": lambda x, y: (x[0, 0] + y, x.max() * y, x.sum() / 2),
}


@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=str)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name, dtype):
    """The usual operators for each dtype: the result's dtype is eager's."""
    agree(ARITHMETIC[name], lambda: (values(dtype), values(dtype).flip(1)), tol=2e-2 if dtype.itemsize < 4 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["add", "scalar", "reduce", "convert", "build"])
def test_arithmetic_on_the_device(name, dtype, device):
    """A choice of them on each device."""
    agree(ARITHMETIC[name], lambda: (values(dtype), values(dtype).flip(1)), device=device, tol=2e-2)


LOGIC = {
    "not": lambda m, n: (~m, m.logical_not()),
    "and": lambda m, n: (m & n, m | n, m ^ n, m.logical_and(n)),
    "sum": lambda m, n: (m.sum(), m.sum(0), m.cumsum(0), m.any(), m.all(), m.float().mean()),
    "arithmetic": lambda m, n: (m * 2, m + 1, m * 1.5, m + n, m * n),
    "mask": lambda m, n: (torch.where(m, 1.0, 0.0), torch.where(m, 1, 0), m.to(torch.int8).argmax()),
    "compare": lambda m, n: (m == n, m != n, m > n),
}


@pytest.mark.parametrize("name", LOGIC)
def test_bool(name, device):
    """Bool in, bool out, and promotion from bool."""

    def make_args():
        return (torch.tensor([True, False, True]), torch.tensor([True, True, False]))

    agree(LOGIC[name], make_args, device=device)


SHIFTS = {
    "shift": lambda x, y: (x << 1, x >> y, 1 << y),
    "bits": lambda x, y: (x & y, x | 6, x ^ y, ~x),
    "division": lambda x, y: (x // y, x % y, torch.div(x, y, rounding_mode="trunc"), torch.fmod(x, y), -x // y),
    "overflow": lambda x, y: (x * 2**62, x.abs() * 3**40, (x * 100).to(torch.int8)),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_int64(name, device):
    """64-bit integers with their wrap-around and their rounding."""
    agree(SHIFTS[name], lambda: (torch.tensor([-7, 7, 12]), torch.tensor([2, 3, 5])), device=device)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex(dtype, device):
    """Complex in and out, real from complex, complex from real."""
    if device.type == "xla" and dtype == torch.complex128:
        pytest.skip("torch_xla itself loses the imaginary part of complex128 when it copies a tensor to the device")

    def f(z, x):
        return (
            z * z.conj(),
            z.real,
            z.imag,
            z.abs(),
            z + x,
            x * 1j,
            torch.view_as_real(z),
            z.sum(),
            z == z.conj(),
        )

    def make_args():
        return (torch.tensor([1 + 2j, -1j, 3.0], dtype=dtype), torch.tensor([1.0, 2.0, 3.0]))

    agree(f, make_args, device=device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_keep_the_dtype(dtype, device):
    """A gradient has the dtype of its input, mixed dtypes or not."""

    def f(x, w):
        return ((x * w).sin(), x.float().sum(), (x + 1.0) * 2)

    def make_args():
        return (values(dtype).requires_grad_(), values(torch.float32).requires_grad_())

    agree(f, make_args, device=device, grad=True, tol=2e-2)


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, 3e38]  # no subnormal: XLA flushes them to zero

EDGES = {
    "max": lambda x: (x.max(), x.amax(0), torch.maximum(x, x.flip(0)), torch.fmax(x, x.flip(0))),
    "sort": lambda x: (x.sort().values, x.argmax(), x.topk(3).values),
    "compare": lambda x: (x == x, x > 0, x.isnan(), x.isinf(), x.isfinite(), x.signbit()),
    "clamp": lambda x: (x.clamp(-1, 1), x.nan_to_num(), x.relu(), x.sign()),
    "softmax": lambda x: (x[1:3].softmax(0), x[3:].log_softmax(0), x[3:].logsumexp(0)),
    "divide": lambda x: (x / 0, 1 / x, x // 1, x % 2, x * 0),
    "round": lambda x: ((x * 0 + 2.5).round(), (x[3:6] + 0.5).round(), (x[3:6] - 1.5).trunc()),
    "pow": lambda x: (x**0, x**-1, x[3:].sqrt(), x**0.5, 0.0 ** x[3:6]),
    "inf mask": lambda x: (torch.zeros_like(x).masked_fill(x > 0, -torch.inf), torch.full_like(x, math.nan)),
}


@pytest.mark.parametrize("name", EDGES)
def test_special_values(name, device):
    """NaN, infinities and signed zeros."""
    if device.type == "xla" and name == "max":
        pytest.skip("XLA:CPU as torch_xla configures it drops NaN in a maximum, lazily too")
    agree(EDGES[name], lambda: (torch.tensor(SPECIAL),), device=device)


SIZES = {
    "0-d": lambda: (torch.tensor(2.0, requires_grad=True), torch.tensor(3.0)),
    "0-d and 1-d": lambda: (torch.tensor(2.0, requires_grad=True), torch.ones(3)),
    "one": lambda: (torch.ones(1, requires_grad=True), torch.ones(1)),
    "empty": lambda: (torch.ones(0, requires_grad=True), torch.ones(0)),
    "empty rows": lambda: (torch.ones(0, 3, requires_grad=True), torch.ones(3)),
    "empty columns": lambda: (torch.ones(3, 0, requires_grad=True), torch.ones(3, 1)),
    "broadcast": lambda: (torch.ones(2, 1, 3, requires_grad=True), torch.ones(4, 1)),
    "five": lambda: (torch.ones(1, 2, 1, 2, 2, requires_grad=True), torch.ones(2)),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name, device):
    """Zero-dimensional, empty and broadcast operands, with gradients."""

    def f(x, y):
        return (x * y, (x + y).sum(), x.sin(), torch.zeros_like(x) * 2, y.numel(), x.dim())

    agree(f, SIZES[name], device=device, grad=True)


EMPTY = {
    "reductions": lambda x: (x.sum(), x.sum(0), x.mean(0), x.prod(), x.any(), x.all(), x.norm()),
    "cat": lambda x: (torch.cat([x, x]), torch.cat([x, torch.ones(2, 3, device=x.device)]), torch.stack([x, x])),
    "matmul": lambda x: (x @ x.t(), x.t() @ x, x @ torch.ones(3, 2, device=x.device)),
    "index": lambda x: (x[:, 0], x[:0], x.t()[1], x.reshape(3, 0), x.unsqueeze(0)),
    "softmax": lambda x: (x.softmax(1), x.softmax(0), x.cumsum(0), x.sort(0).values),
    "max": lambda x: (x.amax(1), x.max(1).values, x.argmax(1)),
    "empty index": lambda x: torch.ones(4, 3, device=x.device)[torch.zeros(0, dtype=torch.int64, device=x.device)],
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty(name, device):
    """Operators on no elements."""
    agree(EMPTY[name], lambda: (torch.ones(0, 3),), device=device)


CUBE = {
    "transposed": lambda b: b.transpose(0, 2),
    "permuted": lambda b: b.permute(2, 0, 1),
    "strided": lambda b: b[:, ::2, 1:],
    "reversed twice": lambda b: b.flip(0),
    "expanded": lambda b: b[:1].expand(4, 3, 4),
    "expanded 0-d": lambda b: b[0, 0, 0].expand(2, 3, 4),
    "sliced": lambda b: b[1:, 1:, 1:],
    "diagonal": lambda b: b.diagonal(0, 1, 2),
    "overlapping windows": lambda b: b.unfold(2, 2, 1),
}

USES = {
    "pointwise": lambda x: (x * 2, x.sin()),
    "reduce": lambda x: (x.sum(-1), x.amax(0), x.cumsum(1)),
    "reshape": lambda x: (x.reshape(-1), x.flatten(1), x.contiguous()),
    "matmul": lambda x: (x @ x.transpose(-1, -2)).sum(),
}


@pytest.mark.parametrize("layout", CUBE)
@pytest.mark.parametrize("name", USES)
def test_layouts(name, layout):
    """Inputs that are not contiguous, with gradients to the leaf that they view."""

    def f(base):
        return USES[name](CUBE[layout](base))

    def g(x):
        return USES[name](x)

    agree(f, lambda: (torch.arange(24.0).reshape(2, 3, 4).requires_grad_(),), grad=True, tol=1e-4)
    agree(g, lambda: (CUBE[layout](torch.arange(24.0).reshape(2, 3, 4)),), tol=1e-4)
