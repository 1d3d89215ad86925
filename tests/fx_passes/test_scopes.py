"""The scope path of a node."""

import torch
from torch import fx

from pure_backend.fx_passes.scopes import name_scopes
from pure_backend.ir.facts import facts


def test_profiler_scopes_are_facts_of_the_nodes_between():
    graph = fx.Graph()
    x = graph.placeholder("x")
    profiler = torch.ops.profiler
    outer = graph.call_function(profiler._record_function_enter_new, ("outer",))
    inner = graph.call_function(profiler._record_function_enter_new.default, ("inner",))
    first = graph.call_method("sin", (x,))
    graph.call_function(profiler._record_function_exit._RecordFunction, (inner,))
    second = graph.call_method("cos", (first,))
    graph.call_function(profiler._record_function_exit, (outer,))
    third = graph.call_method("tan", (second,))
    graph.output(third)
    gm = fx.GraphModule({}, graph)
    name_scopes(gm)
    assert [(node.name, facts(node).scopes) for node in gm.graph.nodes if node.op == "call_method"] == [
        ("sin", ("outer", "inner")),
        ("cos", ("outer",)),
        ("tan", ()),
    ]
    assert not gm.graph.find_nodes(op="call_function", target=profiler._record_function_enter_new)
    assert len(gm.graph.nodes) == 5
