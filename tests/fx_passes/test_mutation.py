"""Writes and views as values: the functional graph computes in torch what the graph computed."""

import pytest
import torch
from propagated import propagated

from pure_backend.fx_passes.functional import Alias, Value
from pure_backend.fx_passes.mutation import functionalize


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
    functional = functionalize(propagated(f, x))
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
    gm = propagated(nothing_written, torch.ones(2, 3))
    functional = functionalize(gm)
    assert [n.target for n in functional.gm.graph.nodes] == [n.target for n in gm.graph.nodes]
    assert not functional.write_backs


def test_outputs_that_alias():
    functional = functionalize(propagated(lambda x: (x.view(-1), x * 1, x.add_(0)), torch.ones(2, 3)))
    view, new, *_ = functional.outputs
    assert isinstance(view, Alias) and isinstance(new, Value)
    x = torch.ones(2, 3)
    assert view.view(x).shape == (6,) and view.view(x).data_ptr() == x.data_ptr()
