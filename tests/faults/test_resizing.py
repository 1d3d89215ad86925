"""Outputs of compiled functions lie in memory of XLA's; torch can resize them as it can its own."""

import gc

import jax.numpy as jnp
import pytest
import torch

from pure_backend import call_jax
from pure_backend.jax_bridge import resizable
from tests.oracle import compiled

FUNCTIONS = {
    "plain": lambda: compiled(lambda x: x + 1),
    "of parameters": lambda: compiled(torch.nn.Linear(512, 512)),
    "a JAX function": lambda: lambda x: call_jax(jnp.sin, (x,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_grow(name, dtype):
    f = FUNCTIONS[name]()
    f = f.to(dtype) if isinstance(f, torch.nn.Module) else f
    for _ in range(2):
        y = f(torch.ones(2, 512, dtype=dtype)).detach()
        want = y.clone()
        y.resize_(3, 512)
        assert torch.equal(y[:2], want)
        ones = torch.ones(4, 3, 512, dtype=dtype)
        torch.add(ones, ones, out=y.resize_(0))
        assert y.shape == (4, 3, 512) and torch.equal(y, ones * 2)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_a_larger_result_goes_into_an_output():
    y = compiled(lambda x: x + 1)(torch.ones(2))
    torch.add(torch.ones(3), 1, out=y)
    assert y.tolist() == [2, 2, 2]


def test_memory_is_freed_and_taken_again():
    """What sharded models do between forward and backward."""
    f = compiled(lambda x: x @ x)
    for _ in range(3):
        y = f(torch.ones(512, 512))
        storage, size = y.untyped_storage(), y.untyped_storage().nbytes()
        storage.resize_(0)
        assert storage.nbytes() == 0
        storage.resize_(size)
        y.copy_(torch.full((512, 512), 3.0))
        torch.testing.assert_close(f(y), torch.full((512, 512), 512 * 9.0))
        del y, storage
        gc.collect()


def test_the_gradient_needs_no_memory_of_the_output():
    w = torch.randn(4, 4, requires_grad=True)
    y = compiled(lambda w: (w @ w).tanh())(w)
    want = torch.autograd.grad((w @ w).tanh().sum(), w)
    y.untyped_storage().resize_(0)
    torch.testing.assert_close(torch.autograd.grad(y, w, torch.ones(4, 4)), want)


def test_a_view_of_an_output_that_is_resized():
    x = torch.ones(6)
    y, z = compiled(lambda x: ((y := x + 1), y[2:]))(x)
    y.resize_(12)
    z.mul_(3)
    assert y[:6].tolist() == [2, 2, 6, 6, 6, 6]


def test_a_storage_of_another_layout_stays_as_it_is(monkeypatch):
    """Where torch's storages cannot be told apart as expected nothing is written into them."""
    monkeypatch.setattr(resizable, "_layout", lambda: None)
    resizable.resizable_maker.cache_clear()
    try:
        tensor = torch.from_numpy(torch.ones(3).numpy())
        resizable.resizable_maker(torch.device("cpu"))(tensor)
        assert not tensor.untyped_storage().resizable()
    finally:
        resizable.resizable_maker.cache_clear()
