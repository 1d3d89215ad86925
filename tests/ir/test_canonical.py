"""A graph as text."""

import torch
from propagated import propagated

from pure_backend.ir.canonical import foreign, graph_key

X = torch.ones(2, 3)


def key(f, *args):
    return graph_key(propagated(f, *args))


def test_equal_graphs_have_equal_text_whatever_their_names_are():
    def renamed(other):
        first = other.sin()
        return first * 2

    assert key(lambda x: x.sin() * 2, X) == key(renamed, X)


def test_what_a_graph_computes_is_in_its_text():
    keys = [
        key(lambda x: x.sin() * 2, X),
        key(lambda x: x.sin() * 2.0, X),
        key(lambda x: 2 * x.sin(), X),
        key(lambda x: x.sin() * 2, X.double()),
        key(lambda x: x.sin() * 2, torch.ones(3, 2).t()),
        key(lambda x: x.sin() * 2, X.clone().requires_grad_()),
    ]
    assert len(set(keys)) == len(keys)


def test_functions_of_others_are_told():
    def mine(x):
        return x + 1

    gm = propagated(lambda x: x.sin(), X)
    assert list(foreign(gm)) == []
    node = next(node for node in gm.graph.nodes if node.target == "sin")
    node.op, node.target = "call_function", mine
    assert list(foreign(gm)) == [(node, mine)]
