"""Group E of the cases: autograd."""

import copy

import pytest
import torch
from oracle import agree, compiled
from torch import nn


class Mul(torch.autograd.Function):
    """A product whose backward is wrong on purpose, and differently for each position."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return 10 * g * b, 100 * g * a


def test_e01_one_tensor_in_two_positions(device):
    """E01 https://github.com/pytorch/pytorch/issues/183604"""
    x = torch.tensor([2.0]).to(device).requires_grad_()
    compiled(lambda x: Mul.apply(x, x).sum())(x).backward()
    assert x.grad.tolist() == [220]


def test_e01_one_tensor_passed_twice(device):
    """E01 https://github.com/pytorch/pytorch/issues/183604 (through our own wrapper)"""
    x = torch.tensor([3.0]).to(device).requires_grad_()
    compiled(lambda a, b: (a * a * b).sum())(x, x).backward()
    assert x.grad.tolist() == [27]


class Ste(torch.autograd.Function):
    """Straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


def test_e02_custom_backward_is_used(device):
    """E02 https://github.com/pytorch/pytorch/issues/193279"""
    x = torch.tensor([0.3, 1.7]).to(device).requires_grad_()
    compiled(lambda x: Ste.apply(x).sum())(x).backward()
    assert x.grad.tolist() == [1, 1]


class Scale(torch.autograd.Function):
    """A non-tensor argument and a `None` gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return 7 * g * ctx.factor, None


class Both(torch.autograd.Function):
    """Uses `needs_input_grad`."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return (5 * g * b if ctx.needs_input_grad[0] else None), (3 * g * a if ctx.needs_input_grad[1] else None)


class Top(torch.autograd.Function):
    """Two outputs, one of them not differentiable."""

    @staticmethod
    def forward(ctx, x):
        values, index = x.max(-1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        ctx.size = x.shape
        return values * 1, index

    @staticmethod
    def backward(ctx, g, _):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.size, device=g.device).scatter(-1, index[..., None], 2 * g[..., None])


CUSTOM = {
    "non-tensor argument": lambda x, y: Scale.apply(x, 2.5),
    "one input needs no grad": lambda x, y: Both.apply(x, y.detach()),
    "both need grad": lambda x, y: Both.apply(x, y * 2).sin(),
    "not differentiable output": lambda x, y: Top.apply(x * y),
    "twice": lambda x, y: Ste.apply(Ste.apply(x) * y),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_e02_custom_functions(name, device):
    """E02 https://github.com/pytorch/pytorch/issues/193279"""

    def make_args():
        x = torch.tensor([[0.3, 1.7], [-2.2, 0.9]], requires_grad=True)
        return x, torch.tensor([1.5, 2.0], requires_grad=True)

    agree(CUSTOM[name], make_args, device=device, grad=True)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_e04_inference_then_training(first, device):
    """E04 https://github.com/pytorch/pytorch/issues/100977"""
    m = nn.Linear(3, 3).to(device)
    c = compiled(m)
    with first():
        assert not c(torch.ones(1, 3, device=device)).requires_grad
    c(torch.ones(1, 3, device=device)).sum().backward()
    assert (m.weight.grad == 1).all()


def regions(x):
    with torch.enable_grad():
        a = x + 1
    with torch.no_grad():
        b = x * 2
    return a, b


def test_e05_enable_grad_inside_no_grad(device):
    """E05 https://github.com/pytorch/pytorch/issues/114338"""
    x = torch.zeros(3).to(device).requires_grad_()
    with torch.no_grad():
        a, b = compiled(regions)(x)
    assert a.requires_grad
    assert not b.requires_grad
    a.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_e05_no_gradient_through_a_no_grad_region(device):
    """E05 https://github.com/pytorch/pytorch/issues/114338 (the mixed case)"""

    def f(x):
        a, b = regions(x)
        return a * b

    got = agree(f, lambda: (torch.tensor([1.0, 2, 3], requires_grad=True),), device=device, grad=True)
    assert got.outputs.tolist() == [4, 12, 24]


def test_e08_integer_and_bool_outputs(device):
    """E08 https://github.com/jax-ml/jax/pull/19538"""

    def f(x, ids, mask):
        p = x[ids].softmax(-1)
        return p, p.argmax(-1), p > 0.5, mask

    def make_args():
        return (
            torch.linspace(-1, 1, 15).sin().reshape(5, 3).requires_grad_(),
            torch.tensor([0, 2]),
            torch.tensor([True]),
        )

    got = agree(f, make_args, device=device, grad=True, pure=True)
    assert [x.requires_grad for x in got.outputs] == [True, False, False, False]
    assert [x.dtype for x in got.outputs[1:]] == [torch.int64, torch.bool, torch.bool]


class Dead(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.dead = nn.Linear(2, 2)

    def forward(self, x, y):
        return self.a(x), y.sin()


def run_dead(m, device):
    y = torch.ones(2).to(device).requires_grad_()
    out, _ = compiled(m)(torch.ones(1, 2, device=device), y)
    out.sum().backward()
    return y


def test_e09_dead_parameters_stay_where_they_are(device):
    """E09 https://github.com/pytorch/pytorch/issues/131794"""
    m = Dead().to(device)
    before = copy.deepcopy(m.dead.weight)
    run_dead(m, device)
    assert m.a.weight.grad is not None
    assert m.dead.weight.grad is None
    torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1).step()
    assert m.dead.weight.equal(before)


def test_e09_input_of_an_unused_output_has_no_gradient(device):
    """E09 https://github.com/pytorch/pytorch/issues/104272"""
    assert run_dead(Dead().to(device), device).grad is None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(5, 3)
        self.h = nn.Linear(3, 5, bias=False)
        self.h.weight = self.e.weight

    def forward(self, i):
        return self.h(self.e(i))


def test_e14_tied_embedding(device):
    """E14 https://github.com/google/torchax/issues/68"""
    got = agree(Tied(), lambda: (torch.tensor([1, 2]),), device=device, grad=True, pure=True)
    assert got.grads["parameter e.weight"] is got.grads["parameter h.weight"]


def test_e14_still_tied_after_a_step_and_a_round_trip(device):
    """E14 https://github.com/google/torchax/issues/68"""
    m = Tied().to(device)
    m.h.weight = m.e.weight
    compiled(m)(torch.tensor([1, 2], device=device)).sum().backward()
    torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert m.h.weight is m.e.weight
    m.load_state_dict(copy.deepcopy(m.state_dict()))
    twin = copy.deepcopy(m)
    assert twin.h.weight is twin.e.weight
    ids = torch.tensor([4, 0], device=device)
    torch.testing.assert_close(compiled(twin)(ids).cpu(), m(ids).cpu())
