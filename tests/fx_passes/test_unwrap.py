"""Wrapper subclasses taken apart: the graph of plain tensors computes what the graph computed."""

import torch
import torch.nn.functional as F
from propagated import propagated, with_facts
from torch import fx
from wrappers import Scaled

from pure_backend.fx_passes.unwrap import has_wrappers, unwrap
from pure_backend.ir.facts import origin
from pure_backend.pipeline import normalize


def weight():
    return Scaled.of(torch.randint(-8, 8, (4, 3), dtype=torch.int8), torch.rand(4, 1))


def test_a_graph_of_plain_tensors_computes_the_same():
    x, w = torch.rand(2, 3), weight()
    gm = propagated(lambda x, w: F.linear(x, w).sin(), x, w)
    border = unwrap(gm)
    assert has_wrappers(gm)
    inputs = border.enter([x, w])
    assert all(type(value) is torch.Tensor for value in inputs) and len(inputs) == 3
    (result,) = border.leave([x, w], border.gm(*inputs))
    torch.testing.assert_close(result, F.linear(x, w).sin())


def test_its_nodes_go_by_the_names_of_those_they_were_made_of():
    x, w = torch.rand(2, 3), weight()
    gm = propagated(lambda x, w: F.linear(x, w).sin(), x, w)
    names = {node.name for node in gm.graph.nodes}
    assert {origin(node) for node in unwrap(gm).gm.graph.nodes if node.op != "output"} <= names


def test_a_wrapper_that_is_handed_through_is_the_same_object():
    w = weight()
    border = unwrap(with_facts(normalize(fx.symbolic_trace(lambda w: (w, w * 2))).gm, w))
    same, _ = border.leave([w], border.gm(*border.enter([w])))
    assert same is w
