"""JAX operators and Pallas kernels inside every transform, with gradients, against plain torch."""

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch import nn

import pure_backend
from pure_backend import PureModule, assume_pure, fori_loop, jax_op, scan, scan_layers, while_loop


def _affine(x_ref, w_ref, o_ref):
    o_ref[...] = jnp.tanh(x_ref[...]) * w_ref[...] + x_ref[...]


@jax_op("kernels_test::affine")
def affine(x: jax.Array, w: jax.Array) -> jax.Array:
    """`tanh(x) * w + x` in a kernel."""
    return pl.pallas_call(_affine, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, w)


def reference(x, w):
    """The same in torch."""
    return x.tanh() * w + x


affine.register_vjp(
    lambda x, w: (affine._fn(x, w), (x, w)),
    lambda saved, ct: (ct * (saved[1] / jnp.cosh(saved[0]) ** 2 + 1), ct * jnp.tanh(saved[0])),
)


class Layer(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op, self.weight = op, nn.Parameter(torch.full((8, 128), 0.5))

    def forward(self, x):
        return self.op(x, self.weight)


def in_a_scan(op, x, w):
    last, ys = scan(lambda c, v: (op(c, w) * v, c), x, torch.tensor([1.0, 0.5, 2.0], device=x.device))
    return last.sum() + ys.sum()


def in_a_fori_loop(op, x, w):
    return fori_loop(0, 3, lambda i, v: op(v, w), x).sum()


def in_a_pure_function(op, x, w):
    return assume_pure(lambda x, w: op(x, w).sum())(x, w)


CASES = [in_a_scan, in_a_fori_loop, in_a_pure_function]


@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_gradients(f, device):
    results = []
    for op in (affine, reference):
        torch.manual_seed(2)
        x, w = (torch.randn(8, 128).to(device).requires_grad_() for _ in range(2))
        out = f(op, x, w)
        out.backward()
        results.append((out.detach().cpu(), x.grad.cpu(), w.grad.cpu()))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_in_modules(device):
    layers = nn.ModuleList(Layer(affine) for _ in range(3)).to(device)
    x = torch.ones(8, 128, device=device, requires_grad=True)
    scanned = scan_layers(layers, x)
    scanned.sum().backward()
    want = y = torch.ones(8, 128, requires_grad=True)
    weight = torch.full((8, 128), 0.5)
    for _ in range(3):
        y = reference(y, weight)
    y.sum().backward()
    torch.testing.assert_close(scanned.cpu(), y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.cpu(), want.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(PureModule(layers[0])(x).cpu(), reference(torch.ones(8, 128), weight), rtol=1e-4, atol=1e-4)


def test_in_a_while_loop(device):
    with torch.no_grad():
        w = torch.full((8, 128), 0.5, device=device)
        _, y = while_loop(lambda n, v: n > 0, lambda n, v: (n - 1, affine(v, w)), (torch.tensor(2, device=device), w))
        torch.testing.assert_close(y.cpu(), reference(reference(w, w), w).cpu(), rtol=1e-4, atol=1e-4)


def test_scan_layers_inside_a_compiled_function(device):
    layers = nn.ModuleList(Layer(affine) for _ in range(3)).to(device)
    f = torch.compile(lambda x: scan_layers(layers, x * 2).sum() * 3, backend="assume_pure", fullgraph=True)
    torch.testing.assert_close(
        f(torch.ones(8, 128, device=device)), scan_layers(layers, torch.full((8, 128), 2.0, device=device)).sum() * 3
    )


def test_checkpoint_saves_memory():
    """The bytes that the forward keeps for the backward, as `explain` tells them."""
    w = torch.randn(16, 16, requires_grad=True)

    def step(c, x):
        return ((c @ w).tanh() @ w + x).sin(), ()

    def kept(checkpoint):
        report = pure_backend.explain(lambda c, xs: scan(step, c, xs, checkpoint=checkpoint)[0].sum())(
            torch.randn(4, 16), torch.randn(32, 4, 16)
        )
        (partition,) = report.partitions
        return partition.residual_bytes

    assert kept(True) < 0.6 * kept(False)
