"""Group F of the cases: control flow, in the spelling of torch's higher-order operators."""

import pytest
import torch
from oracle import agree, compiled
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

PURE = {"pure": True, "options": {"on_impure": "error"}}


class Loop(nn.Module):
    """A body that captures a parameter of a module, one of its own, and makes a constant."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.lin, self.ext = kind, nn.Linear(1, 1), nn.Parameter(torch.tensor([2.0]))

    def step(self, x):
        return self.lin(x) * self.ext + torch.ones(1, device=x.device)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            for _ in range(3):
                x = self.step(x)
            return x
        if self.kind == "while":
            start = x.new_zeros((), dtype=torch.int64)
            return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, self.step(x)), (start, x))[1]
        return scan(lambda x, _: (self.step(x), x.clone()), x, x.new_zeros(3))[0]


def test_f01_while_loop_captures(device):
    """F01 https://github.com/pytorch/xla/issues/7839"""
    with torch.no_grad():
        agree(Loop("while"), lambda: (torch.tensor([1.0]),), device=device, **PURE)


def test_f01_gradients_reach_what_a_loop_captures(device):
    """F01 https://github.com/pytorch/xla/issues/7665

    A `while_loop` with gradients is left to eager, whose own gradients of captured tensors are wrong (torch 2.9 and 2.13).
    """
    agree(Loop("scan"), lambda: (torch.tensor([1.0]),), device=device, grad=True, **PURE)


def test_f03_scan_body_writes_its_carry(device):
    """F03 https://github.com/pytorch/xla/pull/7901: refused by torch, never dropped"""

    def body(c, x):
        c.mul_(2)
        return c + x, c.clone()

    with pytest.raises(Exception, match="mutation"):
        compiled(lambda c, xs: scan(body, c, xs))(torch.ones(1, device=device), torch.arange(3.0, device=device).reshape(3, 1))


def test_f05_checkpoint_inside_a_scanned_function(device):
    """F05 https://github.com/pytorch/xla/issues/8620"""

    def layers(x, weights):
        def block(x, w):
            y = checkpoint(lambda t: torch.tanh(t @ w), x, use_reentrant=False)
            return y, y.sum()

        if torch.compiler.is_compiling():
            return scan(block, x, weights)[0]
        for w in weights:
            x, _ = block(x, w)
        return x

    def make_args():
        generator = torch.Generator().manual_seed(0)
        return torch.ones(2, 8, requires_grad=True), torch.randn(4, 8, 8, generator=generator).requires_grad_()

    agree(layers, make_args, device=device, grad=True, **PURE)


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="torch 2.13's scan fails on an integer carry with gradients in Dynamo")
def test_f10_scan_with_an_integer_in_its_carry(device):
    """F10 https://github.com/jax-ml/jax/issues/22045"""

    def f(x):
        start = (x.new_zeros((), dtype=torch.int64), x.new_zeros(()))
        return scan(lambda c, a: ((c[0] + 1, c[1] + a * c[0]), c[1].clone()), start, x)[0][1]

    x = torch.ones(4).to(device).requires_grad_()
    s = compiled(f, options=PURE["options"])(x)
    s.backward()
    assert s.item() == 6
    assert x.grad.tolist() == [0, 1, 2, 3]
