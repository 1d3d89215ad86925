"""Facts of every node, from one run on fake tensors."""

import torch
from propagated import no_lowering, propagated
from torch import fx

from pure_backend.fx_passes.inputs import fake_inputs
from pure_backend.fx_passes.propagate import propagate
from pure_backend.ir.facts import facts


def test_writes_and_changes_of_geometry_are_told_apart():
    def f(x):
        y = x.clone()
        y.t_()
        y.mul_(2)
        with torch.no_grad():
            y[0] = 1
        return y

    nodes = {str(node.target): node for node in propagated(f, torch.ones(2, 3)).graph.nodes}
    (y,) = {arg for arg, _ in facts(nodes["t_"]).restrided}
    assert facts(nodes["t_"]).writes == () and facts(nodes["t_"]).restrided[0][1].size == (3, 2)
    assert facts(nodes["mul_"]).writes == (y,) and facts(nodes["mul_"]).grad
    assert facts(nodes["<built-in function setitem>"]).writes == (y,) and not facts(nodes["<built-in function setitem>"]).grad
    assert facts(y).geometry.size == (2, 3), "as it was when the node ran"


def test_modes_are_put_back_when_a_node_raises():
    gm = fx.Graph()
    x = gm.placeholder("x")
    gm.call_function(torch._C._set_grad_enabled, (False,))
    gm.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    gm.output((gm.call_method("view", (x, 7)),))
    gm = fx.GraphModule({}, gm)
    mode, fakes = fake_inputs(gm, [torch.ones(3)])
    (found,) = propagate(gm, fakes, mode, no_lowering)
    assert found.kind == "raises"
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
