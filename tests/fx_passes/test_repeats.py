"""Repeated stretches as calls of one body, as a loop, and with its operands stacked before."""

import torch
from propagated import propagated

from pure_backend.fx_passes.chains import loop_chains
from pure_backend.fx_passes.mutation import functionalize
from pure_backend.fx_passes.repeats import share_repeats
from pure_backend.fx_passes.stacks import hoist_stacks
from pure_backend.ir.region import Chain, Shared


def layers(x, a, b, c):
    for w in (a, b, c):
        x = ((x @ w).relu().sin() * 2 + 1).cos().tanh().sigmoid().exp()
    return x


def targets(gm, kind):
    return [node.target for node in gm.graph.nodes if isinstance(node.target, kind)]


def test_each_step_computes_the_same():
    args = [torch.rand(4, 4) for _ in range(4)]
    functional = functionalize(propagated(layers, *args))
    gm, wanted = functional.gm, layers(*args)
    assert share_repeats(gm)
    assert len(targets(gm, Shared)) == 3 and len({target.gm for target in targets(gm, Shared)}) == 1
    torch.testing.assert_close(gm(*args)[0], wanted)
    loop_chains(gm)
    (loop,) = targets(gm, Chain)
    assert loop.turns == 3 and not targets(gm, Shared)
    torch.testing.assert_close(gm(*args)[0], wanted)
    stacked = hoist_stacks(functional, ())
    assert stacked.inputs.sources == (0, (1, 2, 3))


def test_what_stays_an_input_by_itself_is_not_stacked():
    args = [torch.rand(4, 4) for _ in range(4)]
    functional = functionalize(propagated(layers, *args))
    share_repeats(functional.gm)
    loop_chains(functional.gm)
    assert hoist_stacks(functional, [2]).inputs.sources == (0, 1, 2, 3)


def test_graphs_without_repeats_are_left_alone():
    gm = functionalize(propagated(lambda x: x.sin().cos(), torch.ones(3))).gm
    assert not share_repeats(gm)
