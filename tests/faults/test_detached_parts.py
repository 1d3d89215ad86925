"""`detach` and grad modes inside of what becomes one node: vmap, torch.func, composites, allow_in_graph functions."""

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, compiled


def quietly(f, *args):
    with torch.no_grad():
        return f(*args)


def loudly(t):
    with torch.enable_grad():
        u = t.sin()
    return u * t.cos()


def scaled_in_place(t):
    y = t * 3
    with torch.no_grad():
        y.mul_(2)
    return y * t


def detached_in_place(t):
    y = t * 2
    y.detach_()
    return y * t


def written_while_detached(t):
    y = t * 2
    y.detach().mul_(3)
    return y * t


PARTS = {
    "detach": lambda t: t * t.detach(),
    "data": lambda t: t * t.data,
    "no_grad": lambda t: t * quietly(torch.sin, t),
    "detached result": lambda t: (t.detach() * 2, t * 1),
    "detach of a view": lambda t: t[1:].detach() * t[1:],
    "view of a detach": lambda t: t.detach()[1:] * t[1:],
    "straight through": lambda t: t.round().detach() + t - t.detach(),
    "saved results": lambda t: (t.tanh() * t.sigmoid().detach()).softmax(0) * t.exp(),
    "in place": scaled_in_place,
    "written while detached": written_while_detached,
    "detach_": detached_in_place,
    "enable_grad in no_grad": lambda t: t * quietly(loudly, t),
}


@torch._dynamo.allow_in_graph
def opaque(name, t):
    return PARTS[name](t)


def with_saved_gradient(f, t):
    return torch.func.grad(lambda s: sum(r.sum() for r in _tuple(f(s))))(t) * t


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


PLACES = {
    "vmap": lambda f: lambda x, w: torch.vmap(f)(x),
    "vmap of vmap": lambda f: lambda x, w: torch.vmap(torch.vmap(f))(x[:, None]),
    "grad": lambda f: lambda x, w: with_saved_gradient(f, x),
    "vmap of grad": lambda f: lambda x, w: torch.vmap(lambda t: with_saved_gradient(f, t))(x),
    "vjp": lambda f: lambda x, w: torch.func.vjp(f, x)[0],
    "jvp": lambda f: lambda x, w: torch.func.jvp(f, (x,), (w,))[1],
    "allow_in_graph": None,
}


def make_args():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(3, 4, generator=generator) for _ in range(2))
    return x.requires_grad_(), w


# Eager raises: "accessing `data` under vmap", "Can't detach views in-place".
RAISES = {("vmap", "data"), ("vmap of vmap", "data"), ("vmap", "detach_"), ("vmap of vmap", "detach_")}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch 2.13 in forward mode
@pytest.mark.parametrize(("place", "part"), [(p, q) for p in PLACES for q in PARTS if (p, q) not in RAISES])
def test_detached_parts(place, part):
    f = PARTS[part]
    g = (lambda x, w: opaque(part, x)) if PLACES[place] is None else PLACES[place](f)

    def with_anchor(x, w):
        out = g(x, w)
        return (sum((o * x[: len(o)]).sum() for o in _tuple(out)) if place == "jvp" else out), (x * w).sum()

    agree(with_anchor, make_args, grad=True)


def test_as_it_was_seen(device):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True, device=device)
    options = {"options": {"on_impure": "error"}}
    compiled(lambda x: torch.vmap(lambda t: t * t.detach())(x), **options)(x).sum().backward()
    assert x.grad.tolist() == [1, 2, 3]


@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax(hard):
    """A composite that detaches: the gradient goes straight through to the soft weights, whose rows sum to one."""
    x = torch.randn(2, 5, requires_grad=True)
    compiled(lambda x: F.gumbel_softmax(x, hard=hard))(x).sum().backward()
    assert x.grad.abs().max() < 1e-6


def test_straight_through_under_vmap():
    agree(
        lambda x: torch.vmap(lambda t: t + (t.round() - t).detach())(x), lambda: (torch.ones(2, 5).requires_grad_(),), grad=True
    )


@torch._dynamo.allow_in_graph
def structured(pair, scale=2, *, more=None):
    """Takes and gives structures, writes its argument."""
    pair["a"].mul_(scale)
    return {"sum": pair["a"] + pair["b"], "again": [pair["a"].view(-1), scale]}


def test_a_function_with_structures(device):
    def f(x, y):
        a = x * 1
        out = structured({"a": a, "b": y}, scale=3, more=None)
        return out["sum"] * a, out["again"][0]

    agree(f, make_args, device=device, grad=True, options={"on_impure": "error"})


@torch._dynamo.allow_in_graph
def scaled(x, by):
    return x * by


def test_a_function_of_a_float_that_changes():
    """What changes from call to call is no constant of the program."""
    f = compiled(lambda x, by: scaled(x, by * 2).sin(), dynamic=True)
    for by in (1.0, 2.5, 3.5):
        torch.testing.assert_close(f(torch.ones(3), by), (torch.ones(3) * by * 2).sin())
