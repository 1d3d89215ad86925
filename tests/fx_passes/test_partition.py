"""An impure graph in stages, and which stage each node is in."""

import torch
from propagated import no_lowering, normalized

import pure_backend
from pure_backend.fx_passes.inputs import fake_inputs
from pure_backend.fx_passes.partition import partition
from pure_backend.fx_passes.propagate import propagate
from pure_backend.fx_passes.schedule import schedule

watch = pure_backend.impure(lambda x: x * 2)


def impure_graph(f, x):
    """A propagated graph, and the names of its impure nodes."""
    gm = normalized(f, x)
    mode, fakes = fake_inputs(gm, [x])
    return gm, [impurity.node for impurity in propagate(gm, fakes, mode, no_lowering)]


def test_the_stages_one_after_the_other_compute_what_the_graph_computed():
    def f(x):
        a = x.sin()
        return watch(a).cos() * (x + 1)

    x = torch.rand(3)
    gm, impure = impure_graph(f, x)
    stages, grad_after = partition(gm, impure, 1)
    assert [(stage.pure, stage.nodes) for stage in stages] == [(True, 2), (False, 1), (True, 2)] and grad_after is None
    values = {gm.graph.find_nodes(op="placeholder")[0].name: x}
    for stage in stages:
        values.update(zip(stage.outputs, stage.gm(*(values[name] for name in stage.inputs)), strict=True))
    assert torch.equal(values[gm.graph.output_node().args[0][0].name], f(x))


def test_small_partitions_are_eager():
    gm, impure = impure_graph(lambda x: watch(x.sin()).cos(), torch.rand(3))
    (stage,) = partition(gm, impure, 2)[0]
    assert not stage.pure and stage.nodes == 3


def stages_by_name(f):
    """The stage of each node, by its target."""
    gm, impure = impure_graph(f, torch.rand(3))
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    return {node.name: stage for node, stage in schedule(nodes, {n for n in nodes if n.name in impure}).items()}


def test_independent_impure_nodes_share_a_stage():
    stages = stages_by_name(lambda x: watch(x.sin()) + watch(x.cos()))
    assert sorted(stages.values()) == [0, 0, 1, 1, 2]


def test_a_write_waits_for_those_who_read_before():
    def f(x):
        y = x.clone()
        seen = watch(y)
        return seen + y.add_(1)

    stages = stages_by_name(f)
    assert (stages["y"], stages["seen"], stages["add_"]) == (0, 1, 2), stages
