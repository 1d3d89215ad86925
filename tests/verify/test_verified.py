"""`options={"verify": True}`: silent where compiled agrees with eager, and else it names the node."""

import logging
import runpy
import subprocess
import sys
import tempfile

import jax
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from oracle import agree, compiled
from torch import nn
from torch._higher_order_ops.scan import scan

import pure_backend
from pure_backend.calls import plan
from pure_backend.jax_bridge.lowerings import registry
from pure_backend.verify import verified

VERIFY = {"options": {"verify": True}}


class Net(nn.Module):
    """Writes a buffer, an argument, and a value in place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x, counter):
        counter.add_(1)
        h = self.norm(F.gelu(self.first(x)))
        h.mul_(2)
        return self.second(h).softmax(-1), h.t()


def fixed(*shape, dtype=torch.float32, grad=False):
    """The same values each time."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(5)).requires_grad_(grad)


def make():
    return fixed(3, 8), torch.zeros(2)


def in_low_precision(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


@torch.compiler.nested_compile_region
def region(x):
    return x.sin()


@torch.no_grad()
def unrecorded(x):
    return x.sin()


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch, tmp_path):
    """Reproducers without a folder of the user's go where pytest cleans up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def wrong(monkeypatch):
    """Replaces a lowering by `change` of its result."""

    def replace(name, change):
        right = registry._LOWERINGS[name]
        monkeypatch.setitem(registry._LOWERINGS, name, lambda *args, **kwargs: change(right(*args, **kwargs)))

    return replace


def steeper(result):
    """The same value with twice the gradient."""
    return 2 * result - jax.lax.stop_gradient(result)


def refusal(f, *args, **options) -> pure_backend.AccuracyError:
    """The error of a training step of `f`."""
    with pytest.raises(pure_backend.AccuracyError) as caught:
        result = compiled(f, options={"verify": True} | options)(*args)
        result.sum().backward()
    return caught.value


# ---------------------------------------------------------------------------------------------------- agreement


def test_verified_training_is_as_any(device):
    agree(Net(), make, device=device, grad=True, pure=True, tol=1e-4, **VERIFY)


FUNCTIONS = {
    "views": (lambda x: (x.t()[1:], x.view(-1).mul(2)), lambda: (fixed(3, 4, grad=True),)),
    "write through a view": (lambda x: x[1:].add_(1) * 2, lambda: (torch.ones(3, 4),)),
    "overlapping inputs": (lambda x, y: (x.add_(1) + y, y * 2), lambda: (lambda t: (t[:4], t[2:]))(torch.arange(6.0))),
    "recorded write": (lambda x, y: x.mul_(y).sin(), lambda: (torch.ones(3), torch.ones(3, requires_grad=True))),
    "complex": (lambda x: (x * x.conj()).real.sum() * x, lambda: (fixed(3, dtype=torch.complex64, grad=True),)),
    "integers": (lambda x: (x.argmax(-1), x.sort().values), lambda: (fixed(3, 4, grad=True),)),
    "no gradient": (lambda x: unrecorded(x) + x, lambda: (fixed(3, grad=True),)),
    "special values": (lambda x: x / 0 + x.log(), lambda: (torch.tensor([-1.0, 0.0, 1.0]),)),
    "float that may change": (lambda x, s: x * s + s, lambda: (fixed(3, grad=True), 0.3)),
    "constant output": (lambda x: (x.sin(), 3, None), lambda: (fixed(3),)),
    "uninitialized memory": (lambda x: torch.empty(3).copy_(x).sin(), lambda: (fixed(3),)),
    "low precision": (lambda x: (x @ x).softmax(-1), lambda: (fixed(8, 8, dtype=torch.bfloat16),)),
    "empty": (lambda x: x.sin(), lambda: (torch.ones(0, 3),)),
    "branch": (
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        lambda: (torch.ones(3),),
    ),
    "checkpoint": (
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False) * 2,
        lambda: (torch.ones(3, requires_grad=True),),
    ),
    "loop": (
        lambda x: scan(lambda c, a: (c * a, c + a), x[0], x)[1],
        lambda: (fixed(3, 2, grad=True),),
    ),
    "region": (lambda x: region(x) + 1, lambda: (fixed(3, grad=True),)),
    "autocast in a checkpoint": (
        lambda x: torch.utils.checkpoint.checkpoint(in_low_precision, x, use_reentrant=False).float(),
        lambda: (fixed(4, 4),),
    ),
    "vmap": (lambda x: torch.vmap(torch.sin)(x) + 1, lambda: (torch.ones(3, 2),)),
}


LOW_PRECISION = ("low precision", "autocast in a checkpoint")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_programs_pass(name):
    f, make_args = FUNCTIONS[name]
    args = make_args()
    grad = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    agree(f, make_args, grad=grad, tol=2e-2 if name in LOW_PRECISION else 1e-5, **VERIFY)


def test_autocast_passes():
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).relu()

    agree(f, lambda: (fixed(4, 4), fixed(4, 4)), tol=2e-2, **VERIFY)


def test_callers_autocast_passes(device):
    def step(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return compiled(lambda x: (x @ x).relu(), **VERIFY)(x)

    x = fixed(4, 4).to(device)
    with torch.autocast("cpu", torch.bfloat16):
        want = (fixed(4, 4) @ fixed(4, 4)).relu()
    torch.testing.assert_close(step(x).cpu(), want)


def test_modes_of_the_caller_pass():
    layer = nn.Linear(3, 3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not compiled(layer, **VERIFY)(torch.ones(2, 3)).requires_grad


def test_arguments_are_changed_once():
    counter = torch.zeros(2)
    f = compiled(Net(), **VERIFY)
    f(torch.randn(3, 8), counter)
    f(torch.randn(3, 8), counter)
    assert counter.tolist() == [2, 2]


def test_random_numbers_are_those_of_an_unverified_call():
    def f(x):
        return F.dropout(x @ x) + torch.rand(4)

    x = torch.ones(4, 4, requires_grad=True)
    results = []
    for options in ({}, VERIFY):
        torch.manual_seed(3)
        y = compiled(f, **options)(x)
        y.sum().backward()
        results.append((y.detach(), torch.rand(2)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_only_first_calls_are_compared(monkeypatch):
    runs = []
    run = verified.run_eagerly
    monkeypatch.setattr(verified, "run_eagerly", lambda gm, args: runs.append(1) or run(gm, args))
    f = compiled(lambda x: x.sin(), dynamic=False, **VERIFY)
    for size in (3, 3, 4, 3):
        f(torch.ones(size))
    assert len(runs) == 2


def test_every_backward_gives_the_gradients():
    x = torch.randn(3, requires_grad=True)
    f = compiled(lambda x: x.sin(), **VERIFY)
    y = f(x)
    for _ in range(2):
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.testing.assert_close(grad, x.cos().detach())
    (grad,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, -x.sin().detach())


def test_explain_verifies():
    report = pure_backend.explain(lambda x: x.sin(), verify=True)(torch.ones(3))
    assert len(report.partitions) == 1


# ---------------------------------------------------------------------------------------------------- disagreement


def test_first_wrong_node_is_named(wrong):
    wrong("F.gelu", lambda result: result * 1.01)
    error = refusal(lambda x: F.gelu(x.sin()).exp().cos(), torch.randn(3, 8))
    assert error.node == "gelu"
    assert 1e-4 < error.error < 1e-1
    for part in (
        "output 0 is off by up to",
        "the first node that differs is gelu = ",
        "f32[3, 8]",
        "test_verified.py",
        "reproducer: ",
    ):
        assert part in str(error)


def test_wrong_gradient_is_found_in_the_first_backward(wrong):
    wrong("F.gelu", steeper)
    x = torch.randn(3, 8, requires_grad=True)
    y = compiled(lambda x: F.gelu(x.sin()).exp(), **VERIFY)(x)
    with pytest.raises(pure_backend.AccuracyError, match="the gradient of input 0 is off") as caught:
        y.sum().backward()
    assert caught.value.node == "gelu"
    assert "the gradient of its argument sin is off" in str(caught.value)


@pytest.mark.parametrize("change", [lambda result: result * 1.01, steeper])
def test_wrong_node_beside_random_ones_is_found(change, wrong):
    wrong("F.gelu", change)
    error = refusal(lambda x: F.gelu(F.dropout(x)).exp(), torch.randn(3, 8, requires_grad=True))
    assert error.node == "gelu"


def test_wrong_write_is_found(wrong):
    wrong("mul", lambda result: result + 1)
    x = torch.ones(3)
    with pytest.raises(pure_backend.AccuracyError, match="input 0 after the call is off") as caught:
        compiled(lambda x: x.mul_(2).shape, **VERIFY)(x)
    assert caught.value.node == "mul_"
    assert "clone.mul_(2)" in caught.value.reproducer.read_text()


def test_wrong_integers_and_special_values_are_found(wrong):
    wrong("argmax", lambda result: result + 1)
    with pytest.raises(pure_backend.AccuracyError, match="3 other values"):
        compiled(lambda x: x.argmax(-1), **VERIFY)(torch.randn(3, 4))
    wrong("sin", lambda result: result * float("nan"))
    with pytest.raises(pure_backend.AccuracyError, match="NaN or infinity"):
        compiled(lambda x: x.sin(), **VERIFY)(torch.randn(3, 4))


def test_nodes_put_together_wrongly_are_told_from_wrong_nodes(monkeypatch):
    call = plan.call_program
    monkeypatch.setattr(plan, "call_program", lambda *args: [result + 1 for result in call(*args)])
    with pytest.raises(pure_backend.AccuracyError, match="no node differs on its own") as caught:
        compiled(lambda x: x.sin(), **VERIFY)(torch.ones(3))
    assert (caught.value.node, caught.value.reproducer) == ("", None)


def test_partitions_of_an_impure_graph_are_verified(wrong, caplog):
    caplog.set_level(logging.CRITICAL, logger="pure_backend")
    wrong("F.gelu", lambda result: result * 1.01)
    watch = pure_backend.impure(torch.clone)
    error = refusal(lambda x: F.gelu(watch(x.sin().cos().exp().tan()).sin().cos().exp()), torch.randn(3))
    assert error.node == "gelu"


def test_a_call_that_failed_is_verified_again(wrong):
    wrong("F.gelu", lambda result: result * 1.01)
    f = compiled(lambda x: F.gelu(x), **VERIFY)
    for _ in range(2):
        with pytest.raises(pure_backend.AccuracyError):
            f(torch.ones(3))


# ---------------------------------------------------------------------------------------------------- reproducers

NODES = {
    "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
    "cat": lambda x: torch.cat([x, x * 2], dim=0),
    "sum": lambda x: x.sum(-1, dtype=torch.float64),
    "add": lambda x: x.clone().add_(x, alpha=2),
    "getitem": lambda x: x[None, ..., 1:3] + 1,
}


@pytest.mark.parametrize("name", NODES)
def test_reproducer_raises_here_and_agrees_where_the_lowering_is_right(name, wrong, tmp_path):
    wrong(name, lambda result: result + 1)
    f = NODES[name]
    error = refusal(f, torch.randn(3, 4, requires_grad=True), verify=str(tmp_path))
    assert error.reproducer.is_relative_to(tmp_path)
    torch.load(error.reproducer.with_name("inputs.pt"), weights_only=True)
    torch._dynamo.reset()
    with pytest.raises(AssertionError):
        runpy.run_path(str(error.reproducer), run_name="__main__")
    run = subprocess.run([sys.executable, "-W", "ignore", error.reproducer], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "compiled agrees with eager\n"


def test_each_reproducer_has_a_folder_of_its_own(wrong, tmp_path):
    wrong("F.gelu", lambda result: result * 1.01)
    paths = set()
    for _ in range(2):
        torch._dynamo.reset()
        paths.add(refusal(lambda x: F.gelu(x), torch.ones(3), verify=tmp_path).reproducer)
    assert {path.parent.name for path in paths} == {"gelu", "gelu_1"}


def test_node_with_a_graph_inside_has_no_reproducer(wrong):
    wrong("hop::cond", lambda results: [result + 1 for result in results])
    error = refusal(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), torch.ones(3))
    assert error.reproducer is None
    assert "no reproducer: the node has graphs or views inside" in str(error)


def test_option_is_checked():
    with pytest.raises(ValueError, match="'verify' must be True, False or a folder, got 3"):
        pure_backend.Options(verify=3)
