"""The passes in torch alone: a graph after them computes what it computed before."""

import pytest
import torch
from torch import fx

from pure_backend.fx_passes.functional import Alias, Value
from pure_backend.fx_passes.inputs import fake_inputs
from pure_backend.fx_passes.mutation import functionalize
from pure_backend.fx_passes.propagate import propagate
from pure_backend.fx_passes.reach import gradient_reach
from pure_backend.ir.facts import facts
from pure_backend.pipeline import normalize


def has_lowering(op):
    """Of the operators of libraries: none."""
    return False


def prepared(f, *args):
    """A propagated graph of `f` as Dynamo captures it."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(f, backend=keep, fullgraph=True)(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
    gm = normalize(graphs[0]).gm
    mode, fakes = fake_inputs(gm, args)
    reach = gradient_reach(fakes)
    assert propagate(gm, fakes, mode, has_lowering) == []
    return gm, reach


def slices(x):
    x[1:] += x[:-1].clone()
    return x * 2


def chained(x):
    y = x.clone()
    y.view(-1)[0] = 7
    y.t()[1].mul_(2)
    return y, y.sum()


def nothing_written(x):
    return x.view(-1).sin(), x.t() @ x


def masked(x):
    y = x * 1
    y[y > 1] = 0
    return y


@pytest.mark.parametrize("f", [slices, chained, nothing_written, masked], ids=lambda f: f.__name__)
def test_the_functional_graph_computes_the_same(f):
    x = torch.arange(6.0).reshape(2, 3)
    functional = functionalize(prepared(f, x)[0])
    given = x.clone()
    results = functional.gm(given)
    assert torch.equal(given, x), "a functional graph writes nothing"
    wanted = x.clone()
    outputs = f(wanted)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for write_back in functional.write_backs:
        given.copy_(results[write_back.index])
    torch.testing.assert_close(given, wanted)
    for output, want in zip(functional.outputs, outputs, strict=True):
        if isinstance(output, Value):
            torch.testing.assert_close(results[output.index], want)


def test_graphs_without_writes_pass_untouched():
    gm, _ = prepared(nothing_written, torch.ones(2, 3))
    functional = functionalize(gm)
    assert [n.target for n in functional.gm.graph.nodes] == [n.target for n in gm.graph.nodes]
    assert not functional.write_backs


def test_outputs_that_alias():
    functional = functionalize(prepared(lambda x: (x.view(-1), x * 1, x.add_(0)), torch.ones(2, 3))[0])
    view, new, *_ = functional.outputs
    assert isinstance(view, Alias) and isinstance(new, Value)
    x = torch.ones(2, 3)
    assert view.view(x).shape == (6,) and view.view(x).data_ptr() == x.data_ptr()


def test_normalize_lifts_attributes_and_keeps_the_original():
    class M(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((2,), 3.0))

        def forward(self, x):
            return x * self.scale + self.scale

    gm = fx.symbolic_trace(M())
    before = str(gm.graph)
    normalized = normalize(gm)
    assert str(gm.graph) == before
    assert [n.op for n in normalized.gm.graph.nodes] == [
        "placeholder",
        "placeholder",
        "call_function",
        "call_function",
        "output",
    ]
    gm.scale = torch.full((2,), 5.0)
    assert normalized.read_lifted()[0].tolist() == [5.0, 5.0]


def test_modes_are_put_back_when_a_node_raises():
    gm = fx.Graph()
    x = gm.placeholder("x")
    gm.call_function(torch._C._set_grad_enabled, (False,))
    gm.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    gm.output((gm.call_method("view", (x, 7)),))
    gm = fx.GraphModule({}, gm)
    mode, fakes = fake_inputs(gm, [torch.ones(3)])
    (found,) = propagate(gm, fakes, mode, has_lowering)
    assert found.kind == "raises"
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_reach_follows_autograd():
    def f(x, y, z):
        return x * y, y.detach() * z, x.round()

    args = [torch.ones(2, requires_grad=True) for _ in range(3)]
    gm, reach = prepared(f, *args)
    leaves = gm.graph.output_node().args[0]
    assert [set(reach(facts(leaf).value)) for leaf in leaves] == [{0, 1}, {2}, {0}]
