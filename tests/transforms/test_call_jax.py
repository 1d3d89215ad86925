"""JAX functions called on torch tensors."""

import functools

import jax
import jax.numpy as jnp
import pytest
import torch

import pure_backend
from pure_backend import call_jax


def waves(tree, by, *, scale=1.0):
    return {"sin": jnp.sin(tree["x"]) * by * scale, "rest": (tree["x"] ** 2, [None, tree["y"] + 1])}


def numbers(n, device="cpu", grad=False):
    torch.manual_seed(6)
    return torch.randn(n).to(device).requires_grad_(grad)


def test_trees_and_gradients(device):
    x, y = numbers(3, device, grad=True), torch.arange(2, device=device)
    got = call_jax(waves, ({"x": x, "y": y}, 2.0), {"scale": 3.0})
    assert sorted(got) == ["rest", "sin"] and got["rest"][1][0] is None and got["rest"][1][1].tolist() == [1, 2]
    (got["sin"].sum() + got["rest"][0].sum()).backward()
    torch.testing.assert_close(x.grad, 6 * x.detach().cos() + 2 * x.detach())


@pytest.mark.parametrize("backend", ["assume_pure", "aot_eager"])
def test_inside_compiled_functions(backend, device):
    def f(x):
        return call_jax(waves, ({"x": x.exp(), "y": x}, 2.0))["sin"].sum() * 2

    x = numbers(3, device, grad=True)
    out = torch.compile(f, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(out, 4 * x.exp().sin().sum())
    out.backward()
    torch.testing.assert_close(x.grad, 4 * (x.exp().cos() * x.exp()).detach())
    if backend == "assume_pure":
        assert pure_backend.statistics().lowerings == 2


def test_functions_are_known_by_content():
    for _ in range(5):
        call_jax(lambda a: a * 2 + 1, (torch.ones(3),))
    assert pure_backend.statistics().traces == 1


FACTOR = 1


def test_what_a_function_reads_counts(monkeypatch):
    def scaled(by):
        return lambda a: a * by

    assert [call_jax(scaled(k), (torch.ones(1),)).item() for k in (1, 2, 3)] == [1, 2, 3]
    assert [call_jax(functools.partial(jnp.multiply, k), (torch.ones(1),)).item() for k in (1, 2)] == [1, 2]
    for factor in (4, 5):
        monkeypatch.setattr(f"{__name__}.FACTOR", factor)
        assert call_jax(lambda a: a * FACTOR, (torch.ones(1),)).item() == factor
    weights = [jnp.ones(1), jnp.ones(1) * 7]
    assert [call_jax(scaled(w), (torch.ones(1),)).item() for w in weights] == [1, 7]


def test_jitted_functions_and_second_derivatives():
    x = numbers(3, grad=True)
    (g,) = torch.autograd.grad(call_jax(jax.jit(jnp.sin), (x,)).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], -x.detach().sin())


def test_bad_calls():
    with pytest.raises(TypeError, match="args must be a tuple"):
        call_jax(jnp.sin, torch.ones(2))
    with pytest.raises(TypeError, match="str"):
        call_jax(lambda x: "text", (torch.ones(2),))
