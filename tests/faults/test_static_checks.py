"""Eager's checks of static arguments, dtypes and shapes: compiled functions raise them too, and keep nothing."""

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, both_raise, compiled
from torch import nn

import pure_backend
from pure_backend.fx_passes import checks

ones = torch.ones
LONG, DOUBLE, BF16, BYTE = torch.int64, torch.float64, torch.bfloat16, torch.int8

RAISES = {
    "celu(alpha=0)": lambda x: F.celu(x, 0),
    "smooth_l1(beta<0)": lambda x: F.smooth_l1_loss(x, x, beta=-1.0),
    "integer linear": lambda x: F.linear(x.long(), ones(3, 4)),
    "linear of two dtypes": lambda x: F.linear(x.double(), ones(3, 4)),
    "matmul of two dtypes": lambda x: x.double() @ ones(4, 3),
    "addmm of two dtypes": lambda x: torch.addmm(ones(3), x.double(), ones(4, 3)),
    "mv of two dtypes": lambda x: torch.mv(x.bfloat16(), ones(4)),
    "bmm of two dtypes": lambda x: torch.bmm(x[None].double(), ones(1, 4, 3)),
    "conv of two dtypes": lambda x: F.conv1d(x[None].double(), ones(3, 2, 1)),
    "negative power": lambda x: x.long() ** -1,
    "fill_ beyond int8": lambda x: x.to(BYTE).fill_(300),
    "full beyond int8": lambda x: torch.full((3,), 300, dtype=BYTE) + x.to(BYTE)[0, 0],
    "masked_fill beyond int8": lambda x: x.to(BYTE).masked_fill(x > 0, 300),
    "index_add of two dtypes": lambda x: x.index_add(0, torch.tensor([0]), ones(1, 4, dtype=DOUBLE)),
    "float & float": lambda x: x & x,
    "integer softmax": lambda x: x.long().softmax(0),
    "integer silu": lambda x: F.silu(x.long()),
    "integer std": lambda x: x.long().std(),
    "norm of two dtypes": lambda x: F.layer_norm(x.double(), (4,), ones(4, dtype=torch.float16)),
    "bce of two dtypes": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid().double()),
    "complex ceil": lambda x: x.to(torch.complex64).ceil(),
    "bool floor": lambda x: x.bool().floor(),
    "uniform_ from > to": lambda x: x.clone().uniform_(2, 1),
    "GRUCell": lambda x: nn.GRUCell(4, 4)(x.double()),
}


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def with_more(name):
    return lambda x: RAISES[name](x.sin() * 2)


@pytest.mark.parametrize("name", RAISES)
def test_eagers_error(name):
    want, got = both_raise(with_more(name), lambda: (ones(2, 4),))
    assert isinstance(got, torch._dynamo.exc.TorchRuntimeError) or str(got).startswith(str(want))  # Dynamo knows some


@pytest.mark.parametrize("size", [64, 3000])
def test_at_other_sizes(size):
    """The check does not depend on sizes, nor takes their memory."""
    linear = nn.Linear(size, size).requires_grad_(False)
    agree(linear, lambda: (ones(3, size),), pure=True, options={"on_impure": "error"})
    both_raise(linear, lambda: (ones(3, size, dtype=LONG),))
    both_raise(nn.Conv2d(8, 8, 3, groups=4), lambda: (ones(1, 8, 9, 9, dtype=BF16),))


def test_a_right_call_afterwards_is_compiled():
    linear = nn.Linear(4, 3)
    f = compiled(lambda x: linear(x).sin().cos() + 1)
    with pytest.raises(RuntimeError, match="dtype"):
        f(ones(2, 4, dtype=DOUBLE))
    assert pure_backend.statistics().calls == 0
    f(ones(2, 4))
    assert pure_backend.statistics().calls == 1


def test_the_generator_is_left_alone():
    """Random operators are tried too, with the state put back."""
    f = compiled(lambda x: F.dropout(x, 0.5).uniform_(0, 1))
    f(ones(3))
    torch.manual_seed(3)
    f(ones(3))
    after = torch.random.get_rng_state()
    torch._dynamo.reset()
    torch.manual_seed(3)
    compiled(lambda x: F.dropout(x, 0.5).uniform_(0, 1))(ones(3))
    assert torch.equal(after, torch.random.get_rng_state())


ALLOWED = {
    "grouped convolution": (lambda x: F.conv2d(x, ones(8, 1, 3, 3), groups=8), lambda: (ones(1, 8, 5, 5),)),
    "integer division": (lambda x: x // (x + 1), lambda: (torch.arange(4),)),
    "inverse": (lambda x: torch.linalg.inv(x), lambda: (torch.eye(3) * 2,)),
    "topk": (lambda x: x.topk(5)[0], lambda: (torch.arange(9.0),)),
    "group norm": (lambda x: F.group_norm(x, 3), lambda: (normal(2, 6, 5),)),
    "index": (lambda x, i: x[i], lambda: (torch.arange(9.0), torch.tensor([8, 3]))),
    "one row": (lambda x, i: x.index_select(0, i), lambda: (ones(1, 3), torch.tensor([0, 0]))),
    "cross entropy": (lambda x, i: F.cross_entropy(x, i), lambda: (normal(4, 9), torch.tensor([8, 3, 0, 1]))),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 3), lambda: (ones(1, 9, 2, 2),)),
    "bilinear": (lambda x: F.interpolate(x, size=(7, 5), mode="bilinear"), lambda: (normal(1, 2, 3, 4),)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), lambda: (normal(1, 2, 5, 8),)),
    "unfold": (lambda x: F.unfold(x, 3), lambda: (normal(1, 2, 5, 5),)),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), lambda: (normal(1, 2, 7, 7),)),
    "fft": (lambda x: torch.fft.rfft(x, n=16).abs(), lambda: (normal(3, 11),)),
    "cdist": (lambda x: torch.cdist(x, x * 2), lambda: (normal(5, 7),)),
    "multinomial": (lambda x: torch.multinomial(x, 1) * 0, lambda: (ones(5),)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_eager_allows_stays_in_one_program(name):
    agree(*ALLOWED[name], pure=True, options={"on_impure": "error"})


def test_a_false_suspicion_is_dropped(monkeypatch):
    """What only values decide: eager runs once, and then the call is compiled like any other."""
    monkeypatch.setattr(checks, "_passed", {})
    f = compiled(lambda x, r: (x.repeat_interleave(r, output_size=5) * 2).sin(), options={"on_impure": "error"})
    args = torch.arange(3.0), torch.tensor([2, 0, 3])
    for calls in (0, 1):
        torch.testing.assert_close(f(*args), (args[0].repeat_interleave(args[1]) * 2).sin())
        assert pure_backend.statistics().calls == calls
