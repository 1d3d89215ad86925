"""Nested arguments and results: containers, dataclasses, numbers, strings, None."""

import collections
import dataclasses
import enum

import pytest
import torch
from oracle import agree, compiled

Point = collections.namedtuple("Point", ["x", "y"])


class Mode(enum.Enum):
    SIN = "sin"
    COS = "cos"


@dataclasses.dataclass
class State:
    """A carrier of tensors and a number."""

    h: torch.Tensor
    c: torch.Tensor
    step: int = 0


def ones(*size) -> torch.Tensor:
    return torch.ones(*size, requires_grad=True)


def step(state):
    return State(state.h * 2, state.c + state.h, state.step + 1)


def mutate_state(state):
    state.h = state.h * 2
    state.step += 1
    return state


def mutate_dict(d):
    d["new"] = d["a"] * 2
    d["a"] = d["a"] + 1
    return d["new"]


def mutate_list(items):
    items.append(items[0] * 2)
    items[0] = items[0] + 1
    return len(items)


def nothing(x):
    x.sin()


CASES = {
    "dict": (lambda d: {"sum": d["a"] + d["b"], "n": 3}, lambda: ({"a": ones(2), "b": ones(2)},)),
    "nested": (lambda t: ([t[0] * 2, (t[1]["k"][0], None)], {"s": "text"}), lambda: ((ones(2), {"k": [ones(3)]}),)),
    "namedtuple": (lambda p: Point(p.y * 2, p.x), lambda: (Point(ones(2), ones(3)),)),
    "dataclass": (step, lambda: (State(ones(2), ones(2), 3),)),
    "dataclass, mutated": (mutate_state, lambda: (State(ones(2), ones(2), 3),)),
    "dict, mutated": (mutate_dict, lambda: ({"a": ones(2)},)),
    "list, mutated": (mutate_list, lambda: ([ones(2)],)),
    "None in and out": (lambda x, y: (x * 2 if y is None else y, None), lambda: (ones(2), None)),
    "numbers": (lambda x, n, r, s, b: (x * n + r, n + 1, r * 2, s + "!", not b), lambda: (ones(2), 3, 0.5, "a", True)),
    "enum": (lambda x, m: (x.sin() if m is Mode.SIN else x.cos(), m.value), lambda: (ones(2), Mode.COS)),
    "dtype and device": (lambda x, t: (x.to(t), t, x.dtype), lambda: (ones(2), torch.float64)),
    "shape": (lambda x: (x.shape, x.size(0), x * 1), lambda: (ones(2, 3),)),
    "slice and tuple": (lambda x, i: (x[i], i), lambda: (ones(4), (slice(1, 3),))),
    "empty containers": (lambda x, t: (x * 1, t, [], {}), lambda: (ones(2), ())),
    "only numbers out": (lambda x: (x.shape[0], "s", None), lambda: (ones(2),)),
    "nothing": (nothing, lambda: (ones(2),)),
    "the same tensor twice": (lambda x, y: (x * y, x is y), lambda: (lambda t: (t, t))(ones(2))),
    "tensor twice in a list": (lambda t: t[0] * t[1], lambda: ([ones(2)] * 2,)),
    "many arguments": (lambda *xs: sum(xs), lambda: tuple(ones(2) for _ in range(30))),
    "tuple of results": (torch.max, lambda: (ones(2, 3), 1)),
    "defaults": (lambda x, k=2, *rest, flag=False: (x * k, rest, flag), lambda: (ones(2), 3, 4)),
    "tensor subclass Parameter": (lambda p: p * 2, lambda: (torch.nn.Parameter(torch.ones(2)),)),
}

NO_GRADIENT = {"only numbers out", "nothing", "list, mutated"}


@pytest.mark.parametrize("name", CASES)
def test_structures(name, device):
    """What goes in and comes out besides plain tensors."""
    f, make_args = CASES[name]
    agree(f, make_args, device=device, grad=name not in NO_GRADIENT)


def test_keyword_arguments(device):
    """Keywords, and tensors among them."""

    def f(x, *, scale, shift=None):
        return x * scale if shift is None else x * scale + shift

    c = compiled(f)
    x, s = torch.ones(2, device=device), torch.full((2,), 3.0, device=device)
    assert c(x, scale=s).tolist() == [3, 3]
    assert c(shift=x, x=x, scale=2).tolist() == [3, 3]


def test_model_output(device):
    """Hugging Face's `ModelOutput`, in and out."""
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="needs transformers")

    def f(o):
        return outputs.BaseModelOutput(last_hidden_state=o.last_hidden_state * 2, hidden_states=(o[0], o[0] + 1))

    got = agree(f, lambda: (outputs.BaseModelOutput(last_hidden_state=ones(2, 3)),), device=device, grad=True)
    assert type(got.outputs) is outputs.BaseModelOutput
    assert got.outputs.attentions is None


def test_closures_and_globals(device):
    """Tensors that are not arguments at all."""
    w = torch.full((2,), 3.0, device=device, requires_grad=True)
    c = compiled(lambda x: x * w)
    assert c(torch.ones(2, device=device)).tolist() == [3, 3]
    with torch.no_grad():
        w.fill_(5)
    y = c(torch.ones(2, device=device))
    assert y.tolist() == [5, 5]
    y.sum().backward()
    assert w.grad.tolist() == [1, 1]


def test_numpy_inside():
    """`numpy` calls that Dynamo turns into torch."""
    import numpy as np

    def f(x):
        return np.sin(x) * 2 + np.float32(1)

    x = np.linspace(0, 1, 5, dtype=np.float32)
    got = compiled(f)(x)
    assert type(got) is np.ndarray
    np.testing.assert_allclose(got, f(x), rtol=1e-6)


def test_methods_partials_and_functools(device):
    """Callables that are not plain functions."""
    import functools

    class Affine:
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            return x * self.k

        def method(self, x):
            return x + self.k

    x, twice = torch.ones(2, device=device), Affine(2)
    assert compiled(Affine(2).method)(x).tolist() == [3, 3]
    assert compiled(functools.partial(torch.add, alpha=3))(x, x).tolist() == [4, 4]
    assert compiled(lambda x, a=twice: a(x))(x).tolist() == [2, 2]


def test_graph_break_in_the_middle(device, capsys):
    """Both halves are compiled, with gradients through the break."""

    def f(x):
        y = x.sin()
        print("broken here")
        return y * x

    agree(f, lambda: (ones(3),), device=device, grad=True, pure=True)
    assert capsys.readouterr().out.count("broken here") == 2
