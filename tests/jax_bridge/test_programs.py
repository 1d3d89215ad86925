"""Programs: what they keep, what they share, what their HLO looks like."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import compiled
from torch import nn

import pure_backend
from pure_backend.jax_bridge import compile as compiling
from pure_backend.jax_bridge.lower import lower


def program_of(f, *args):
    """The one program that a compiled call of `f` makes, and the call, which keeps it alive."""
    c = compiled(f)
    out = c(*args)
    (program,) = list(compiling.programs._programs.values())
    return program, c, out


def test_inputs_are_not_returned_as_residuals():
    x, w = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    program, *_ = program_of(lambda x, w: x @ w, x, w)
    assert program.derivative.fresh == 0
    assert {residual.input for residual in program.derivative.residuals} == {0, 1}


def chain(x, ws):
    for w in ws:
        x = F.gelu(x @ w) * 2 + 1
    return x


def test_auto_keeps_products_and_recomputes_the_rest():
    counts = {}
    for remat in ("auto", "none", "full"):
        c = program = None
        torch._dynamo.reset()
        gc.collect()
        c = compiled(chain, options={"remat": remat})
        c(torch.ones(4, 4), [torch.ones(4, 4, requires_grad=True) for _ in range(3)])
        (program,) = list(compiling.programs._programs.values())
        counts[remat] = program.derivative.fresh
        del c, program
    assert counts["full"] == 0
    assert counts["auto"] == 3
    assert counts["none"] > counts["auto"]


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


@pytest.mark.parametrize("attend", [attention, F.scaled_dot_product_attention])
def test_auto_keeps_the_weights_of_an_attention_and_not_its_scores(attend):
    inputs = [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
    compiled(attend)(*inputs)
    (program,) = compiling.programs._programs.values()
    assert [r.fresh for r in program.derivative.residuals if r.input is None] == [0]
    assert program.derivative.forward.out_avals[1].shape == (2, 3, 8, 8)


def test_a_masked_attention_keeps_its_weights_once():
    inputs = [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
    compiled(F.scaled_dot_product_attention)(*inputs, torch.rand(8, 8) > 0.5)
    (program,) = compiling.programs._programs.values()
    assert [a.shape for a in program.derivative.forward.out_avals[1:]].count((2, 3, 8, 8)) == 1


def test_equal_models_share_one_program():
    functions = (lambda x, w: (x @ w).relu(), lambda a, b: (a @ b).relu(), lambda p, q: torch.relu(torch.matmul(p, q)))
    calls = [compiled(f) for f in functions]  # three graphs of Dynamo's, one program
    for call in calls[:2]:
        call(torch.ones(2, 4), torch.ones(4, 3, requires_grad=True)).sum().backward()
    seen = pure_backend.statistics()
    assert (seen.traces, seen.lowerings) == (1, 2)
    assert seen.cache_hits == 1
    calls[2](torch.ones(2, 4), torch.ones(4, 3, requires_grad=True))  # other operators, another text
    assert pure_backend.statistics().traces == 2


def test_different_constants_are_different_programs():
    fs = [compiled(lambda x, k=k: x * k + k) for k in (2, 3, 2.0, True)]
    results = [f(torch.ones(2)).tolist() for f in fs]
    assert results == [[4.0, 4.0], [6.0, 6.0], [4.0, 4.0], [2.0, 2.0]]


def test_programs_die_with_the_model():
    m = nn.Linear(4, 4)
    c = compiled(m)
    c(torch.ones(1, 4)).sum().backward()
    assert len(compiling.programs) == 1
    ref = weakref.ref(m)
    del m, c
    torch._dynamo.reset()
    gc.collect()
    assert ref() is None
    assert len(compiling.programs) == 0


def test_a_replaced_function_object_is_not_served_another_program():
    """Functions that no name can tell apart go into the key as objects, not by id."""
    results = []
    for k in range(20):

        def f(x, k=k):
            return x + k

        results.append(compiled(f)(torch.zeros(1)).item())
        del f
        gc.collect()
    assert results == list(range(20))


@pytest.mark.parametrize(
    ("f", "shapes", "dots"),
    [
        (lambda q, k: torch.einsum("bthd,bshd->bhts", q, k), [(2, 3, 4, 5), (2, 6, 4, 5)], 1),
        (lambda x, w: F.linear(x, w), [(2, 3, 8), (16, 8)], 1),
        (lambda x, y: torch.matmul(x, y), [(2, 3, 4, 5), (2, 3, 5, 6)], 1),
    ],
    ids=["einsum", "linear", "matmul"],
)
def test_one_dot_a_product_and_no_merging_reshape(f, shapes, dots):
    """I05 https://github.com/pytorch/xla/issues/8713, forward and backward."""
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    program, *_ = program_of(f, *args)
    forward = lower(program.derivative.forward, "cpu").hlo.as_text()
    backward = lower(program.backward_jaxpr((True,)), "cpu").hlo.as_text()
    assert forward.count("stablehlo.dot_general") == dots
    assert backward.count("stablehlo.dot_general") == 2 * dots
    assert "stablehlo.reshape" not in forward + backward


def test_module_paths_are_in_the_hlo():
    """J01: module paths reach the op names of both programs, and do not enter the key."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return self.encoder(x)

    program, *_ = program_of(Net(), torch.ones(2, 4))
    texts = [
        lower(jaxpr, "cpu").hlo.as_text(debug_info=True)
        for jaxpr in (program.derivative.forward, program.backward_jaxpr((True,)))
    ]
    assert all("encoder/" in text for text in texts)


def test_second_derivatives_are_lowered_only_when_asked_for():
    x = torch.ones(3, requires_grad=True)
    _, c, y = program_of(lambda x: x.sin(), x)
    y.sum().backward()
    assert pure_backend.statistics().lowerings == 2
    (g,) = torch.autograd.grad(c(x).sum(), x, create_graph=True)
    g.sum().backward()
    assert pure_backend.statistics().traces == 1
    assert pure_backend.statistics().lowerings > 2


def test_specializations_are_bounded():
    c = compiled(lambda x: x * 2, dynamic=True, options={"max_specializations": 4})
    for n in range(2, 12):
        assert c(torch.ones(n)).sum() == 2 * n
    gc.collect()
    assert len(compiling.programs) <= 4
