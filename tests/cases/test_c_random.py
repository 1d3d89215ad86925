"""Group C of the cases: randomness, dropout, checkpoint."""

import torch
import torch.nn.functional as F
from oracle import compiled
from torch import nn
from torch.utils.checkpoint import checkpoint

import pure_backend


def test_c01_random_numbers_are_not_burnt_in(device):
    """C01 https://github.com/pytorch/xla/issues/8636"""
    c = compiled(lambda x: F.dropout(x, 0.5, True))
    x = torch.ones(1000, device=device)
    torch.manual_seed(1)
    a, b = c(x).cpu(), c(x).cpu()
    torch.manual_seed(1)
    a2, b2 = c(x).cpu(), c(x).cpu()
    assert not a.equal(b)
    assert a.equal(a2)
    assert b.equal(b2)
    assert set(a.tolist()) == {0.0, 2.0}
    assert abs(a.mean() - 1) < 0.15
    assert pure_backend.statistics().traces == 1
    assert pure_backend.statistics().lowerings == 1


def test_c01_backward_uses_the_mask_of_forward(device):
    """C01 https://github.com/google/torchax/issues/17"""
    x = torch.ones(1000, device=device, requires_grad=True)
    y = compiled(lambda x: F.dropout(x, 0.5, True))(x)
    y.sum().backward()
    assert x.grad.cpu().equal(y.detach().cpu())


def test_c01_two_sites_have_two_masks(device):
    """C01 https://github.com/pytorch/xla/issues/8636"""
    drop = nn.Dropout(0.5)
    a, b = compiled(lambda x: (drop(x), drop(x)))(torch.ones(1000, device=device))
    kept = ((a != 0) & (b != 0)).float().mean().item()
    assert abs(kept - 0.25) < 0.08


def test_c02_no_tracer_left_in_torchax(no_tracer_leaks):
    """C02 https://github.com/google/torchax/pull/95"""
    import jax

    c = compiled(lambda x: x + torch.rand_like(x))
    c(torch.zeros(3))
    import torchax  # fixed and imported by the first compile

    env = torchax.default_env()
    assert not isinstance(env.prng_key, jax.core.Tracer)
    with env:
        assert torch.rand(2, device="jax").shape == (2,)
    assert c(torch.zeros(5)).shape == (5,)
    assert not isinstance(env.prng_key, jax.core.Tracer)


def test_c04_recomputation_draws_the_same_mask(device):
    """C04 https://github.com/pytorch/pytorch/issues/190758"""

    def f(x):
        return checkpoint(lambda t: F.dropout(t, 0.5, True) * t, x, use_reentrant=False)

    x = torch.randn(2000).to(device).requires_grad_()
    y = compiled(f)(x)
    y.sum().backward()
    x, y, grad = x.detach().cpu(), y.detach().cpu(), x.grad.cpu()
    assert 0.4 < (y != 0).float().mean() < 0.6
    torch.testing.assert_close(grad, torch.where(y != 0, 4 * x, 0))
