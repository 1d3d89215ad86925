"""Sizes and numbers that change from call to call."""

import pytest
import torch
from oracle import compiled
from torch import nn

import pure_backend

FUNCTIONS = {
    "size as number": lambda x: x.sum() * x.shape[0],
    "reshape": lambda x: x.reshape(x.shape[1], -1),
    "arange": lambda x: x + torch.arange(x.shape[0], device=x.device)[:, None],
    "zeros": lambda x: torch.cat([x, torch.zeros(x.shape[0], 1, device=x.device)], 1),
    "arithmetic of sizes": lambda x: x[: x.shape[0] // 2 + 1].mean() / (x.shape[0] ** 0.5),
    "view": lambda x: x.t().contiguous().view(-1),
    "write": lambda x: write(x),
    "return of a size": lambda x: (x * 2, x.shape[0], x.numel() + 1),
    "branch on a size": lambda x: x.sin() if x.shape[0] > 4 else x.cos(),
    "expand": lambda x: x[None].expand(3, *x.shape).sum(0),
    "causal mask": lambda x: (x @ x.t()).masked_fill(torch.ones(x.shape[0], x.shape[0], device=x.device).triu(1).bool(), -1),
    "split": lambda x: x.split(2)[-1] * 1,
    "softmax": lambda x: x.softmax(0).std(1),
    "loop over rows": lambda x: sum(row * i for i, row in enumerate(x)),
}


# Dynamo's defaults, which torch_xla changes when it is imported.
automatic = torch._dynamo.config.patch(automatic_dynamic_shapes=True, specialize_float=False)


def write(x):
    y = x * 1
    y[x.shape[0] - 1] = x.shape[0]
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_changing_sizes(name, device):
    """`dynamic=True`: each size as in eager, with gradients, in any order."""
    f = FUNCTIONS[name]
    c = compiled(f, dynamic=True)
    for n in (3, 5, 2, 3):
        results = []
        for call, where in ((f, "cpu"), (c, device)):
            x = torch.linspace(-1, 1, n * 4).mul(7).sin().reshape(n, 4).to(where).requires_grad_()
            y = call(x)
            head, *rest = y if isinstance(y, tuple) else (y,)
            head.sum().backward()
            results.append((head.detach().cpu(), rest, x.grad.cpu()))
        (want, numbers, grad), (got, other_numbers, other_grad) = results
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(other_grad, grad)
        assert other_numbers == numbers


@automatic
def test_automatic_dynamic(device):
    """Without `dynamic=`: Dynamo turns a size that changed into a symbol."""
    m = nn.Linear(4, 2)
    c = compiled(m if device.type == "cpu" else nn.Linear(4, 2).to(device))
    for n in (2, 3, 4, 5, 2, 0, 1):
        assert c(torch.ones(n, 4, device=device)).shape == (n, 2)


def test_one_specialization_per_size(device):
    """A new size costs one trace, a known one nothing."""
    c = compiled(lambda x: x.sin() * 2, dynamic=True)
    seen = []
    for n in (3, 5, 3, 7, 5, 7):
        c(torch.ones(n, device=device))
        seen.append(pure_backend.statistics().traces)
    assert seen == [1, 2, 2, 3, 3, 3]


NUMBERS = {
    "int": (lambda x, k: x * k + k, (2, 3, 5, 2)),
    "int as size": (lambda x, k: torch.ones(k, device=x.device) + x[:k].sum(), (2, 3, 1, 0)),
    "int as index": (lambda x, k: x[k] + x[k:].sum(), (2, 3, 4, 2)),
    "int as dimension": (lambda x, k: x.view(2, 3).sum(k), (0, 1, -1)),
    "large int": (lambda x, k: x.long() + k, (2**40, 2**33 + 1, -(2**50))),
    "float": (lambda x, k: x * k - k, (0.5, 0.25, 1e-3, -7.5)),
    "float special": (lambda x, k: x * k, (1.0, float("inf"), 0.0)),
    "bool": (lambda x, k: x.sin() if k else x.cos(), (True, False, True)),
    "float and comparison": (lambda x, k: x * k if k > 0.3 else x / (1 + k), (0.5, 0.25, 0.75)),
    "power": (lambda x, k: x**k, (2, 3, 0.5)),
}


@automatic
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
@pytest.mark.parametrize("name", NUMBERS)
def test_changing_numbers(name, dynamic, device):
    """Python numbers as arguments."""
    f, numbers = NUMBERS[name]
    c = compiled(f, dynamic=dynamic)
    x = torch.arange(6.0)
    for k in numbers:
        want, got = f(x, k), c(x.to(device), k)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)


def test_sizes_and_requires_grad_together(device):
    """Specializations by size and by mask do not mix."""
    c = compiled(lambda x, w: (x * w).sum(0), dynamic=True)
    for n, wanted in ((2, True), (3, False), (2, False), (3, True), (2, True)):
        w = torch.ones(4).to(device).requires_grad_(wanted)
        y = c(torch.ones(n, 4, device=device), w)
        assert y.tolist() == [n] * 4
        assert y.requires_grad == wanted


def test_growing_cache(device):
    """Concatenation from a zero-length start (G10)."""
    c = compiled(lambda k, x: torch.cat([k, x], 1))
    k = torch.zeros(1, 0, 4, device=device)
    for t in range(6):
        k = c(k, torch.full((1, 1, 4), float(t), device=device))
    assert k[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_attribute_that_counts():
    """An integer attribute that changes at every call."""

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, x):
            self.n += 1
            return x * self.n

    m = Count()
    c = compiled(m)
    assert [c(torch.ones(1)).item() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert m.n == 5
