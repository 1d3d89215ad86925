"""Graphs as the passes get them, for tests of one pass in torch alone."""

import torch
from torch import fx

from pure_backend.fx_passes.inputs import fake_inputs
from pure_backend.fx_passes.propagate import propagate
from pure_backend.pipeline import normalize


def no_lowering(op):
    """Of the operators of libraries: none has one."""
    return False


def normalized(f, *args) -> fx.GraphModule:
    """The graph of `f` as Dynamo captures it, normalized."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(f, backend=keep, fullgraph=True)(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
    return normalize(graphs[0]).gm


def propagated(f, *args) -> fx.GraphModule:
    """The graph of `f` with facts; it has no impure nodes."""
    return with_facts(normalized(f, *args), *args)


def with_facts(gm, *args) -> fx.GraphModule:
    """A normalized graph without impure nodes, with facts."""
    mode, fakes = fake_inputs(gm, args)
    assert propagate(gm, fakes, mode, no_lowering) == []
    return gm
