"""`torch.func` transforms inside a compiled function."""

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, compiled
from torch import nn

# One program, nothing of it in eager.
PURE = {"pure": True, "options": {"on_impure": "error"}}


def under_no_grad(f, x):
    with torch.no_grad():
        return f(x)


TRANSFORMS = {
    "vmap": lambda x, w: torch.vmap(lambda row: (row * w).sum() + row)(x),
    "vmap of matmul": lambda x, w: torch.vmap(lambda row: torch.outer(row, w) @ w)(x),
    "nested vmap": lambda x, w: torch.vmap(torch.vmap(lambda a: a.sin() * 2))(x) * w,
    "out_dims": lambda x, w: torch.vmap(lambda row: row * w, out_dims=1)(x),
    "grad": lambda x, w: torch.func.grad(lambda a: (a * a * w).sum())(x),
    "vmap of grad": lambda x, w: torch.vmap(torch.func.grad(lambda row: (row.sin() * w).sum()))(x),
    "grad under no_grad": lambda x, w: under_no_grad(torch.func.grad(lambda a: (a * a * w).sum()), x),
    "in place inside": lambda x, w: torch.vmap(lambda row: (row * 1).add_(w).mul_(2))(x),
    "two regions": lambda x, w: torch.vmap(lambda r: r + w)(torch.vmap(lambda r: r * w)(x).sin()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, device):
    """Values and, through `vmap`, gradients."""

    def make_args():
        x = torch.linspace(-1, 1, 12).reshape(3, 4)
        return (x.requires_grad_("grad" not in name), torch.tensor([0.5, -1.0, 2.0, 0.25]))

    agree(TRANSFORMS[name], make_args, device=device, grad="grad" not in name)


def test_a_failure_inside_leaves_no_level_behind():
    def f(x):
        return torch.vmap(lambda row: row.view(7))(x)

    for _ in range(2):
        with pytest.raises(Exception):  # noqa: B017  (whatever Dynamo or eager raise)
            compiled(f)(torch.ones(3, 4))
    assert torch._C._functorch.maybe_current_level() is None


def tensors():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, generator=generator), torch.randn(4, generator=generator)


FURTHER = {
    "jvp": lambda x, w: torch.func.jvp(lambda a: a.sin() * w, (x,), (x * 2,)),
    "jvp of two": lambda x, w: torch.func.jvp(lambda a, b: a * b, (x, w), (x, w * 2)),
    "jacrev": lambda x, w: torch.func.jacrev(lambda a: (a * w).sin())(x[0]),
    "jacfwd": lambda x, w: torch.func.jacfwd(lambda a: (a * w).sin())(x[0]),
    "hessian": lambda x, w: torch.func.hessian(lambda a: (a.sin() * w).sum())(x[0]),
    "vjp": lambda x, w: torch.func.vjp(lambda a: a * w, x)[1](x * 3),
    "grad_and_value": lambda x, w: torch.func.grad_and_value(lambda a, b: (a.sin() * b).sum())(x, w),
    "grad by two": lambda x, w: torch.func.grad(lambda a, b: (a.sin() * b).sum(), argnums=(0, 1))(x, w),
    "has_aux": lambda x, w: torch.func.grad(lambda a: ((a * w).sum(), a * 2), has_aux=True)(x),
    "in_dims": lambda x, w: torch.vmap(lambda a, b: a * b.sum(), in_dims=(0, None))(x, w),
    "in_dims of 1": lambda x, w: torch.vmap(lambda a: a.cumsum(0), in_dims=1)(x),
    "chunks": lambda x, w: torch.vmap(lambda a: a * w, chunk_size=2)(x),
    "linear": lambda x, w: torch.vmap(lambda a: F.linear(a, w.outer(w)))(x),
    "softmax": lambda x, w: torch.vmap(lambda a: a.softmax(0) @ w)(x),
    "layer_norm": lambda x, w: torch.vmap(lambda a: F.layer_norm(a, (4,), w))(x),
    "convolution": lambda x, w: torch.vmap(lambda a: F.conv1d(a[None], w[None, None, :3]))(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch 2.13 in forward mode
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FURTHER)
def test_further_transforms(name, grad, device):
    """Values, and gradients through the transform."""
    agree(FURTHER[name], lambda: tuple(t.requires_grad_(grad) for t in tensors()), device=device, grad=grad, **PURE)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's own linearize
def test_linearize():
    """Only on the CPU: torch_xla does not know the zero tensors that torch makes for it."""
    agree(lambda x, w: torch.func.linearize(lambda a: a.sin() * w, x)[1](x), tensors, **PURE)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        parameters = {name: p * 2 for name, p in self.lin.named_parameters()}
        return torch.func.functional_call(self.lin, parameters, (x,))


class PerSample(Functional):
    def forward(self, x):
        parameters = {name: p.detach() for name, p in self.lin.named_parameters()}

        def loss(parameters, row):
            return (torch.func.functional_call(self.lin, parameters, (row,)) ** 2).sum()

        return torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x), self.lin(x)


@pytest.mark.parametrize("module", [Functional, PerSample])
def test_functional_call(module, device):
    agree(module(), lambda: (tensors()[0],), device=device, grad=True, **PURE)


@pytest.mark.parametrize("draw", [torch.rand_like, lambda a: F.dropout(a, 0.5, True)])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_over_random(randomness, draw, device):
    """One draw for all rows or one for each, and new ones at every call."""
    f = compiled(lambda x: torch.vmap(lambda a: draw(a) + a, randomness=randomness)(x), options=PURE["options"])
    first, second = (f(torch.ones(2, 500).to(device)).cpu() for _ in range(2))
    assert torch.equal(first[0], first[1]) == (randomness == "same")
    assert not torch.equal(first, second)
