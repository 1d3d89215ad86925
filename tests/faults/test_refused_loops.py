"""Normalization layers in the bodies of loops: a refusal moves nothing; statistics that are only read are no obstacle."""

import pytest
import torch
from oracle import agree
from torch import nn

from pure_backend import fori_loop, scan, while_loop
from pure_backend._compat import SCAN_TAKES_INTEGERS

LOOPS = {
    "scan": lambda norm, x: scan(lambda c, row: (c + norm(row).sum(), c), x.new_zeros(()), x),
    "fori_loop": lambda norm, x: fori_loop(0, 3, lambda i, c: c + norm(c), x[0]),
    "while_loop": lambda norm, x: while_loop(lambda c: c.sum() < 9, lambda c: c + norm(c), (x[0],)),
}


# torch 2.13 lets the body of while_loop write.
REFUSED = list(LOOPS) if SCAN_TAKES_INTEGERS else ["scan", "fori_loop"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_leaves_everything_as_it_was(name):
    norm = nn.BatchNorm1d(3)
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    generator = torch.random.get_rng_state()
    with pytest.raises(Exception, match="mutation"), torch.no_grad():
        LOOPS[name](norm, torch.ones(4, 5, 3))
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())
    assert torch.equal(generator, torch.random.get_rng_state())


class Looped(nn.Module):
    def __init__(self, loop):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(0.5)
        self.eval()
        self.loop = loop

    def forward(self, x):
        if self.loop == "cond":
            return torch.cond(x.sum() > 0, lambda x: self.norm(x), lambda x: self.norm(x) * 2, (x[0],))
        return LOOPS[self.loop](self.norm, x)


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "cond"])
def test_statistics_that_are_read(loop, device):
    """One program, with the gradients of weight and bias."""
    x = torch.linspace(-1, 2, 60).reshape(4, 5, 3)
    agree(
        Looped(loop), lambda: (x.clone().requires_grad_(),), device=device, grad=True, tol=1e-4, options={"on_impure": "error"}
    )
