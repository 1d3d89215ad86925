"""Conversions, integers that wrap, and results of 16-bit floats that are rounded once, as eager has them on x86."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import agree

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALL = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    -1.0,
    -1.9,
    127.0,
    128.0,
    255.0,
    256.0,
    300.7,
    -129.0,
    32768.0,
    -32769.0,
    65536.0,
    70000.0,
    2.0**31,
]
LARGE = [-(2.0**31), -3e9, 3e9, 1e10, -1e10, 2.0**53, 2.0**62, -(2.0**63), 2.0**63, 1e30, -1e30, math.inf, -math.inf, math.nan]
LARGE_UNSIGNED = [1e9, 2.0**62, -(2.0**62), 2.0**63, 1.5e19, 2.0**64, 1e30, math.inf, -math.inf, math.nan]


def _floats(dtype, to) -> torch.Tensor:
    """Of uint32 only what its torch's vectorized and scalar loops agree on."""
    values = {torch.uint32: [0.0, 1.9, -1.0, 65536.0, 3e9], torch.uint64: SMALL + LARGE_UNSIGNED}.get(to, SMALL + LARGE)
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("to", INTEGERS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_to_integers(dtype, to):
    """What an integer does not hold wraps, or is its smallest."""
    agree(lambda x: (x.to(to), x[1].to(to), torch.zeros(len(x), dtype=to).copy_(x)), lambda: (_floats(dtype, to),), pure=True)


def test_floats_to_integers_on_the_device(device):
    """The same on each device: the program itself converts."""

    def f(x):
        return x.to(torch.uint8), x.to(torch.int32), x.to(torch.int64), x.bool(), (x * 1.5).to(torch.int16)

    agree(f, lambda: (_floats(torch.float32, torch.int64),), device=device)


def test_other_conversions():
    """Complex numbers, bools, integers to floats, and the 8-bit floats."""

    def f(x, z, i):
        eighths = x.to(torch.float8_e4m3fn).float(), x.to(torch.float8_e5m2).float(), x.half().to(torch.float8_e4m3fn).float()
        integers = i.half(), i.bfloat16(), i.float(), i.to(torch.int8), i.to(torch.uint8), i.int()
        return x.bool(), z.bool(), x.sum(dtype=torch.float64), *eighths, *integers

    x = torch.tensor([*SMALL, *LARGE, 448.0, 464.0, 465.0, 480.0, 1e-3, 57344.0, 61440.0])
    z = torch.tensor([0, 1j, 1, complex(0, math.nan)])
    i = torch.tensor([2**53 + 1, 2**24 + 1, 2**63 - 1, -(2**63), 2049, 65519, 65520, -1])
    agree(f, lambda: (x, z, i), pure=True)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_parts_of_complex():
    """A complex number loses its imaginary part, and is rounded as its real part is."""
    z = torch.tensor([300.7 + 1j, -1 + 0j, complex(math.nan, 1)])
    agree(lambda z: (z.to(torch.uint8), z.to(torch.int64), z.half()), lambda: (z,), pure=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integer_power(dtype):
    """It wraps; a negative exponent gives 0 but for 1 and -1."""
    base = torch.tensor([0, 1, 2, 3, 5, 7, 127, 255]).to(dtype)
    exponent = torch.tensor([0, 1, 2, 3, 7, 8, 31, 63, 64, 100, 127]).to(dtype)

    def f(x, y):
        signed = (x[:, None] ** -y, (-x)[:, None] ** y, (-x)[:, None] ** -y) if dtype != torch.uint8 else ()
        return x[:, None] ** y, x**100, 3**y, x.pow(0), *signed

    agree(f, lambda: (base, exponent), pure=True)


def test_integers_at_their_bounds():
    """Absolute values, negation, shifts by more than the width, quotients by negative numbers."""
    low = torch.iinfo(torch.int64).min

    def f(x, y):
        shifts = x << y.abs(), x >> y.abs(), x << 64, x >> 64, x << -1, x >> -1
        quotients = x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc"), x // -3, x % -3
        return x.abs(), -x, x * x, x + x, x - 1, x.sum(), x.prod(), x.cumsum(0), x.cumprod(0), x.sign(), *shifts, *quotients

    agree(f, lambda: (torch.tensor([low, low + 1, -7, 7, 2**62]), torch.tensor([3, -2, 2, -2, -70])), pure=True)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_arange(dtype):
    """Integers are counted with integers."""

    def f():
        steps = torch.arange(1, 9, 2.5, dtype=dtype), torch.arange(0.5, 6, dtype=dtype), torch.arange(9, 0, -2.5, dtype=dtype)
        return *steps, torch.arange(5.7, dtype=dtype)

    agree(f, tuple, tol=0)


def _uniform(dtype, n=4000, low=0.0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, n, generator=made) * 4 + 0.05
    return (x - low).to(dtype), y.to(dtype)


HALVES = [torch.float16, torch.bfloat16]

EXACT = {
    "scalars": lambda x, y: (x * 0.1, 0.1 * x, x / 0.3, x + 0.1, x - 0.3, 0.1 - x, x * 3, x * 2049),
    "0-d": lambda x, y: (x * torch.tensor(0.1), x / torch.tensor(0.3, dtype=torch.float64), x + torch.tensor(0.1)),
    "quotients": lambda x, y: (x / y, x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc")),
    "quotients by scalars": lambda x, y: (
        torch.div(x, 0.123, rounding_mode="trunc"),
        torch.div(x, 0.123, rounding_mode="floor"),
        x // 0.3,
        x % 0.3,
        torch.fmod(x, 0.3),
    ),
    "chain": lambda x, y: ((x * 1000) / 1000, (x * y) / y, x * y + x, (x - y) * 1.5),
    "alpha": lambda x, y: (torch.add(x, y, alpha=2.5), torch.sub(x, y, alpha=0.5)),
    "fused": lambda x, y: (x.addcmul(x, y, value=0.5), x.addcdiv(x, y, value=0.5), torch.lerp(x, y, 0.1), torch.lerp(x, y, y)),
    "in place": lambda x, y: (x.clone().mul_(0.1), x.clone().div_(0.3), x.clone().lerp_(y, 0.3), x.clone().addcdiv_(x, y)),
    "foreach": lambda x, y: (*torch._foreach_mul([x, y], 0.1), *torch._foreach_addcdiv([x], [y], [x], 0.3)),
    "cumulative": lambda x, y: (x[:64].cumsum(0), (x[:64] / 2).cumprod(0)),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_rounded_once(name, dtype):
    """Bit by bit, but for a few that another order of the f32 computation rounds otherwise."""
    torch._dynamo.reset()
    args = _uniform(dtype)
    want = EXACT[name](*args)
    got = torch.compile(EXACT[name], backend="assume_pure")(*args)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.dtype == b.dtype
        assert (a != b).float().mean() < 0.005, f"result {i}: {(a != b).sum()} of {a.numel()} differ"


AS_EXACT = {
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "pow": torch.pow,
    "cumsum": lambda x, y: x.cumsum(0),
    "cumprod": lambda x, y: (y[:40] / 2).cumprod(0),
    "addcdiv": lambda x, y: x.addcdiv(x, y, value=-1.0),
    "addcmul": lambda x, y: x.addcmul(x, y, value=-0.3),
    "addmm": lambda x, y: torch.addmm(x[:64].view(8, 8), x[:64].view(8, 8), y[:64].view(8, 8), beta=0.7, alpha=0.3),
    "avg_pool2d": lambda x, y: F.avg_pool2d(x.view(1, 1, 20, 25), 5, 2, 1),
    "adaptive_avg_pool2d": lambda x, y: F.adaptive_avg_pool2d(x.view(1, 1, 20, 25), (3, 5)),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", AS_EXACT)
def test_no_less_exact_than_eager(name, dtype):
    """The largest error against f64 is eager's."""
    torch._dynamo.reset()
    f, args = AS_EXACT[name], _uniform(dtype, 500)
    truth = f(*(a.double() for a in args))
    unit = torch.finfo(dtype).eps * truth.abs().clamp(min=torch.finfo(dtype).tiny)
    got = torch.compile(f, backend="assume_pure")(*args)
    worst = [((result.double() - truth).abs() / unit)[truth.isfinite() & result.isfinite()].max() for result in (got, f(*args))]
    assert worst[0] <= worst[1] + 0.01, worst


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_constants_are_not_calculated_with(dtype):
    """A quotient is no product with the inverse, and `(x + c) - c` rounds."""

    def f(x):
        tens = torch.div(x, 49.0, rounding_mode="trunc"), torch.div(x, 0.1, rounding_mode="floor"), (x / 41).floor()
        return *tens, (x + 2.0**26) - 2.0**26, (x * 1000) / 1000, x / 3, x / x[0]

    agree(f, lambda: (torch.tensor([49.0, 98.0, 41.0, 82.0, 0.3, 0.9, 1.3]).to(dtype),), tol=0)


def test_a_chain_keeps_no_excess_precision():
    """Each operator rounds to 16 bits."""
    x = torch.tensor([0.1, 0.7, 3.3], dtype=torch.float16)
    agree(lambda x: ((x * 1000) / 1000, (x + 2049.0) * 1.5 - 3, (x * x) / x), lambda: (x,), tol=0)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_bytes(mode):
    """Images of bytes are resized with fixed-point weights, to the bit."""
    image = torch.randint(0, 256, (2, 3, 11, 13), dtype=torch.uint8)

    def f(x):
        smaller = F.interpolate(x, size=(5, 6), mode=mode, antialias=True)
        return smaller, F.interpolate(x, size=(20, 25), mode=mode, antialias=True, align_corners=True)

    agree(f, lambda: (image,), tol=0, pure=True)


@pytest.mark.parametrize("align_corners", [False, True])
def test_bytes_between_pixels(align_corners):
    image = torch.randint(0, 256, (2, 3, 37, 29), dtype=torch.uint8)

    def f(x):
        sizes = ((5, 6), (80, 75), (37, 40))
        return [F.interpolate(x, size=size, mode="bilinear", align_corners=align_corners) for size in sizes]

    agree(f, lambda: (image,), tol=0, pure=True)


SHARED = {
    "twice": lambda a, b: torch._foreach_add_([a, a], 1.0),
    "each other": lambda a, b: torch._foreach_add_([a, b], [b, a]),
    "overlapping views": lambda a, b: torch._foreach_mul_([a[:2], a[1:]], [2.0, 3.0]),
    "alpha": lambda a, b: torch._foreach_add_([a, b, a], [b, a, b], alpha=2),
    "addcmul": lambda a, b: torch._foreach_addcmul_([a, a], [b, a], [a, b], 0.5),
    "addcdiv": lambda a, b: torch._foreach_addcdiv_([a, a], [b, a], [a, b], [0.5, 2.0]),
    "copy": lambda a, b: torch._foreach_copy_([a, b], [b, a]),
    "without a lowering": lambda a, b: torch._foreach_tanh_([a, a.view(3, 1)]),
    "zero": lambda a, b: torch._foreach_zero_([a, a]),
    "maximum": lambda a, b: torch._foreach_maximum_([a, b], [b * 2, a]),
    "apart": lambda a, b: torch._foreach_add_([a, b], 1.0),
}


@pytest.mark.parametrize("name", SHARED)
def test_lists_that_share_memory(name, device):
    """`_foreach_` operators write one tensor after the other, and return them."""

    def f(a, b):
        return SHARED[name](a, b), a * 2, b.sum()

    agree(f, lambda: (torch.arange(1.0, 4.0), torch.tensor([3.0, -2.0, 5.0])), pure=True, device=device)


def test_gradients_of_lists_that_share_memory():
    """Autograd sees only some of the writes; eager's gradients stay."""

    def f(x, b):
        a = x * 2
        torch._foreach_mul_([a, a], [b, b])
        return a.sin()

    agree(f, lambda: (torch.arange(1.0, 4.0).requires_grad_(), torch.tensor([3.0, -2.0, 5.0])), grad=True)


PROMOTED = {
    "scalars": lambda x, i, b: (
        i + 0.5,
        i * 2.0,
        b + 1,
        b * 0.5,
        i / 2,
        b / 2,
        x + 2**40,
        i + True,
        b | True,
        i**2,
        2**i,
        b * b,
    ),
    "0-d": lambda x, i, b: (i + torch.tensor(2**40), i * torch.tensor(0.5), x * torch.tensor(3), b & torch.tensor(True)),
    "bools": lambda x, i, b: (b + b, b * b, b.sum(), b.cumsum(0), b.prod(), b.float().mean(), b.max(), b.to(torch.int8).min()),
    "wide scalar": lambda x, i, b: (i.to(torch.int8) + 200, i.to(torch.uint8) - 300, i.to(torch.uint8) * -1),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_promotion(name, device):
    """0-d tensors and Python scalars."""
    args = (torch.tensor([0.1, 2.0, -3.0]), torch.tensor([3, 7, 100], dtype=torch.int32), torch.tensor([True, False, True]))
    agree(PROMOTED[name], lambda: args, device=device)
