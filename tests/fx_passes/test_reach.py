"""Which inputs a result's gradient reaches."""

import torch
from propagated import no_lowering, normalized

from pure_backend.fx_passes.inputs import fake_inputs
from pure_backend.fx_passes.propagate import propagate
from pure_backend.fx_passes.reach import gradient_reach
from pure_backend.ir.facts import facts


def test_reach_follows_autograd():
    def f(x, y, z):
        return x * y, y.detach() * z, x.round()

    args = [torch.ones(2, requires_grad=True) for _ in range(3)]
    gm = normalized(f, *args)
    mode, fakes = fake_inputs(gm, args)
    reach = gradient_reach(fakes)
    propagate(gm, fakes, mode, no_lowering)
    leaves = gm.graph.output_node().args[0]
    assert [set(reach(facts(leaf).value)) for leaf in leaves] == [{0, 1}, {2}, {0}]
