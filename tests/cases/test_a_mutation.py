"""Group A of the cases: mutation, aliasing, views, buffers."""

import pytest
import torch
from oracle import agree, compiled
from torch import nn

import pure_backend


def bump_both(a, b):
    a.add_(1)
    b.mul_(10)
    return a.sum(), b.sum()


def overlapping():
    base = torch.arange(4.0)
    return base, base[1:3]


def test_a01_overlapping_inputs_as_eager():
    """A01 https://github.com/Lightning-AI/lightning-thunder/issues/2756"""
    got = agree(bump_both, overlapping)
    assert got.args[0].tolist() == [1, 20, 30, 4]
    assert [x.item() for x in got.outputs] == [55, 50]


def test_a01_overlapping_inputs(device):
    """A01 https://github.com/Lightning-AI/lightning-thunder/issues/1235 (views made on the device)"""
    base = torch.arange(4.0).to(device)
    a, b = compiled(bump_both)(base, base[1:3])
    assert base.tolist() == [1, 20, 30, 4]
    assert (a.item(), b.item()) == (55, 50)


def test_a02_writes_through_views(device):
    """A02 https://github.com/pytorch/xla/pull/9025"""

    def f(x):
        y = x.clone()
        y.view(-1)[0] = 7
        y.t()[1].mul_(2)
        _, v = y.chunk(2)
        v.add_(1)
        return y

    got = agree(f, lambda: (torch.arange(4.0).reshape(2, 2),), device=device, pure=True)
    assert got.outputs.tolist() == [[7, 2], [3, 7]]


def test_a03_base_read_after_writes_to_views(device):
    """A03 https://github.com/Lightning-AI/lightning-thunder/issues/652"""

    def f(a):
        b = a.exp()
        c = b.view(-1)
        c.add_(1)
        d = b.t()
        d.mul_(2)
        return b, c / 2, d

    b, c, d = agree(f, lambda: (torch.zeros(2, 2),), device=device, pure=True).outputs
    assert (b == 4).all()
    assert (c == 2).all()
    assert (d == 4).all()


def batch() -> torch.Tensor:
    return torch.tensor([[0.0, 2.0, 4.0], [4.0, 6.0, 8.0]])


def test_a04_batch_norm_running_statistics(device):
    """A04 https://github.com/pytorch/pytorch/issues/88375"""
    bn = nn.BatchNorm1d(3, momentum=0.5).train().to(device)
    c = compiled(bn)
    c(batch().to(device))
    assert bn.running_mean.tolist() == [1, 2, 3]
    torch.testing.assert_close(bn.running_var.cpu(), torch.full((3,), 4.5))
    assert bn.num_batches_tracked.item() == 1
    c(batch().to(device))
    assert bn.running_mean.tolist() == [1.5, 3, 4.5]
    torch.testing.assert_close(bn.running_var.cpu(), torch.full((3,), 6.25))
    assert bn.num_batches_tracked.item() == 2


@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"momentum": None}, {"track_running_stats": False}], ids=str)
def test_a04_batch_norm_options(options, device):
    """A04 https://github.com/pytorch/torchdynamo/issues/1908"""
    if options == {"momentum": None} and device.type == "xla":
        pytest.skip("Dynamo leaves momentum=None to eager, and torch_xla's eager keeps the biased variance")
    agree(nn.BatchNorm1d(3, **options).train(), lambda: (batch(),), device=device, grad=True)


def test_a08_split_pieces_alias_their_source(device):
    """A08 https://github.com/pytorch/xla/issues/3072"""

    def f(x):
        y = x.clone()
        _, q = torch.split(y, [1, 3])
        y.mul_(5)
        return q

    assert agree(f, lambda: (torch.arange(4.0),), device=device, pure=True).outputs.tolist() == [5, 10, 15]


def test_a11_output_view_larger_than_its_input(device):
    """A11 https://github.com/pytorch/pytorch/issues/120336"""

    def f(x):
        return (x.expand(2, 3), x[None], x.as_strided((2, 2), (1, 1)))

    outputs = agree(f, lambda: (torch.arange(3),), device=device).outputs
    assert [x.tolist() for x in outputs] == [[[0, 1, 2], [0, 1, 2]], [[0, 1, 2]], [[0, 1], [1, 2]]]


def test_a13_one_increment_per_call(device):
    """A13 https://github.com/pytorch/xla/pull/4992"""
    x = torch.zeros(3, device=device)
    c = compiled(lambda t: t.add_(1) * 1)
    for count in (1, 2, 3):
        assert c(x).tolist() == [count] * 3
        assert x.tolist() == [count] * 3


class KV(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 8, 2))

    def forward(self, pos, v):
        self.k[:, pos] = v
        return self.k.sum((0, 2))


def test_a16_static_cache_buffer(device):
    """A16 https://github.com/tenstorrent/tt-torch/pull/830"""
    m = KV().to(device)
    c = compiled(m)
    for t in range(3):
        out = c(torch.tensor([t], device=device), torch.full((1, 1, 2), t + 1.0, device=device))
    assert m.k[0, :3, 0].tolist() == [1, 2, 3]
    assert out[:3].tolist() == [2, 4, 6]
    assert pure_backend.statistics().traces == 1
    assert pure_backend.statistics().lowerings == 1


def test_a17_assignment_to_a_slice_of_an_argument(device):
    """A17 https://github.com/huggingface/optimum-tpu/pull/6"""

    def step(cache, pos, kv):
        cache[:, pos] = kv
        return cache.sum()

    def make_args():
        return (torch.zeros(2, 4, 3), torch.tensor(1), torch.ones(2, 3))

    got = agree(step, make_args, device=device, pure=True)
    assert got.outputs.item() == 6
    assert (got.args[0][:, 1] == 1).all()


def saved_bytes(f, x) -> int:
    """Bytes that autograd keeps for the backward of `f(x)`."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        f(x)
    return sum(t.numel() * t.element_size() for t in saved)


def test_a18_views_are_not_saved_again_and_again(device):
    """A18 https://github.com/tenstorrent/tt-xla/issues/1466"""

    def f(t):
        return t.view(-1).reshape(64, 64).t().sin().sum()

    x = torch.randn(64, 64).to(device).requires_grad_()
    assert saved_bytes(compiled(f), x) <= 2 * 64 * 64 * 4
    agree(f, lambda: (torch.linspace(0, 1, 4096).reshape(64, 64).requires_grad_(),), device=device, grad=True)
