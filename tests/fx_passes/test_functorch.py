"""A stretch under `torch.func` transforms as one node."""

import torch
from propagated import normalized, with_facts

from pure_backend.fx_passes.mutation import functionalize
from pure_backend.ir.facts import facts
from pure_backend.ir.region import Region


def per_row(x, w):
    return torch.vmap(lambda row: (row * w).sin().sum())(x.exp()) + 1


def test_a_region_has_its_aten_graph_as_body_and_computes_the_same():
    x, w = torch.rand(3, 2), torch.rand(2)
    gm = normalized(per_row, x, w)
    (region,) = [node for node in gm.graph.nodes if isinstance(node.target, Region)]
    assert not any("batch_dim" in str(node.target) or "nesting" in str(node.target) for node in gm.graph.nodes)
    torch.testing.assert_close(gm(x, w)[0], per_row(x, w))
    with_facts(gm, x, w)
    (body,) = facts(region).bodies
    assert all(isinstance(n.target, torch._ops.OpOverload) for n in body.graph.nodes if n.op == "call_function")
    torch.testing.assert_close(functionalize(gm).gm(x, w)[0], per_row(x, w))
