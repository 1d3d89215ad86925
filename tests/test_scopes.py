"""Module paths, profiler scopes and source lines in the HLO of forward and backward (case J01)."""

import contextlib
import re

import pytest
import torch
import torch.utils.checkpoint
from oracle import agree, compiled, on_lowering
from torch import nn

import pure_backend

CAN_CAPTURE = hasattr(torch._dynamo.config, "capture_profiler_record_function")
captures = pytest.mark.skipif(not CAN_CAPTURE, reason="this torch drops record_function from the graph")


@pytest.fixture
def lowered(monkeypatch) -> list[str]:
    """The HLO text of every program lowered in a test, with its metadata."""
    texts = []
    on_lowering(monkeypatch, lambda _, found: texts.append(found.hlo.compiler_ir("hlo").as_hlo_module().to_string()))
    return texts


def op_names(hlo: str) -> list[str]:
    return re.findall(r'op_name="([^"]*)"', hlo)


def run(f, *args):
    """One training step of `f`, compiled."""
    result = compiled(f)(*args)
    result.sum().backward()


def leaf():
    return torch.ones(4, 4, requires_grad=True)


def in_record_function(x):
    with torch.profiler.record_function("blk"):
        y = (x @ x).sin()
    return y * 2


def in_autograd_record_function(x):
    with torch.autograd.profiler.record_function("blk"):
        return (x @ x).sin()


@torch.profiler.record_function("blk")
def decorated(x):
    return (x @ x).sin()


def helper(x):
    return (x @ x).sin()


def through_a_call(x):
    with torch.profiler.record_function("blk"):
        return helper(x)


def in_own_scope(x):
    with pure_backend.scope("blk"):
        return (x @ x).sin()


FUNCTIONS = [in_record_function, in_autograd_record_function, decorated, through_a_call, in_own_scope]


@pytest.mark.parametrize("f", FUNCTIONS)
def test_scope_reaches_forward_and_backward(f, lowered):
    run(f, leaf())
    forward, backward = lowered
    assert any(re.search(r"\bblk\b.*/dot_general", name) for name in op_names(forward))
    assert any(re.search(r"transpose.*\bblk\b.*/dot_general", name) for name in op_names(backward))


@captures
@pytest.mark.parametrize("f", FUNCTIONS)
def test_captured_scope_reaches_forward_and_backward_once(f, lowered):
    with torch._dynamo.config.patch(capture_profiler_record_function=True):
        run(f, leaf())
    for hlo in lowered:
        products = [name for name in op_names(hlo) if name.endswith("dot_general")]
        assert products and all(name.count("blk") == 1 for name in products)


@pytest.mark.parametrize("capture", [False, pytest.param(True, marks=captures)])
def test_scope_inside_a_checkpointed_function(capture, lowered):
    def f(x):
        return torch.utils.checkpoint.checkpoint(in_record_function, x, use_reentrant=False).sin()

    with torch._dynamo.config.patch(capture_profiler_record_function=True) if capture else contextlib.nullcontext():
        run(f, leaf())
    assert all(any("blk" in name and "dot_general" in name for name in op_names(hlo)) for hlo in lowered)


@captures
def test_captured_scope_may_have_a_computed_name(lowered):
    def f(x):
        for i in range(2):
            with torch.profiler.record_function(f"part{i}"):
                x = x @ x
        return x

    with torch._dynamo.config.patch(capture_profiler_record_function=True):
        run(f, leaf())
    assert all({"part0", "part1"} <= set(re.findall(r"part\d", hlo)) for hlo in lowered)


@captures
@pytest.mark.parametrize("f", FUNCTIONS)
def test_profiler_nodes_are_no_part_of_the_program(f):
    with torch._dynamo.config.patch(capture_profiler_record_function=True):
        agree(f, lambda: (leaf(),), grad=True, pure=True, fullgraph=True)


def test_what_follows_a_scope_is_outside_of_it(lowered):
    run(in_record_function, leaf())
    assert [name for name in op_names(lowered[0]) if name.endswith("/mul") and "blk" in name] == []


class Mlp(nn.Module):
    """Opens a scope around one of its modules."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        with torch.profiler.record_function("blk"):
            y = self.fc(x)
        return self.act(y)


class Model(nn.Module):
    """Opens a scope around each layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x):
        for layer in self.layers:
            with torch.profiler.record_function("layer"):
                x = layer(x)
        return x


@pytest.mark.parametrize("direction", [0, 1])
def test_scopes_and_modules_nest_as_they_were_opened(direction, lowered):
    run(Model(), torch.ones(2, 4))
    names = " ".join(op_names(lowered[direction]))
    for i in (0, 1):
        assert re.search(rf"\blayer/layers/{i}/blk/fc\b", names)
        assert re.search(rf"\blayer/layers/{i}/act/1\b", names)


def test_source_line_is_the_users(lowered):
    run(Model(), torch.ones(2, 4))
    assert re.search(r"test_scopes\.py", lowered[0])


def test_scope_names_do_not_part_equal_graphs():
    def other(x):
        with torch.profiler.record_function("another"):
            y = (x @ x).sin()
        return y * 2

    first, second = compiled(in_record_function), compiled(other)
    first(leaf()), second(leaf())
    assert pure_backend.statistics().traces == 1


@pytest.mark.xla
def test_xla_traces_can_be_made_traceable(monkeypatch, lowered):
    import torch_xla.debug.profiler as xp

    monkeypatch.setattr(xp, "Trace", xp.Trace)  # put back after the test
    pure_backend.make_xla_traces_traceable()
    pure_backend.make_xla_traces_traceable()

    @xp.trace_me("outer")
    def f(x):
        with xp.Trace("blk"):
            return (x @ x).sin()

    x = leaf()
    run(f, x)
    for hlo in lowered:
        assert any(re.search(r"\bouter/blk\b.*dot_general", name) for name in op_names(hlo))
    with xp.Trace("eager"):
        assert torch.equal(x.detach() @ x.detach(), torch.full((4, 4), 4.0))


@pytest.mark.xla
def test_own_scope_is_a_trace_in_eager_beside_torch_xla():
    import torch_xla.debug.profiler as xp

    assert isinstance(pure_backend.scope("blk"), xp.Trace)
