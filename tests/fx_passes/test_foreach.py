"""List operators as the methods that they call, where it matters that these are called in turn."""

import torch
from propagated import propagated

from pure_backend.fx_passes.foreach import one_after_the_other


def calls(f, *args):
    """The methods and constants of the one list operator in the graph of `f`."""
    (node,) = (node for node in propagated(f, *args).graph.nodes if "_foreach_" in str(node.target))
    return [(method, args[1:], kwargs) for method, args, kwargs in one_after_the_other(node)]


def test_tensors_that_share_memory_are_written_in_turn():
    assert calls(lambda x: torch._foreach_add_([x, x], 1.0), torch.ones(2)) == [("add_", (1.0,), {})] * 2
    assert calls(lambda x: torch._foreach_mul_([x[0], x], [2.0, 3.0]), torch.ones(2)) == [
        ("mul_", (2.0,), {}),
        ("mul_", (3.0,), {}),
    ]


def test_the_order_of_others_does_not_matter():
    assert calls(lambda x, y: torch._foreach_add_([x, y], 1.0), torch.ones(2), torch.ones(2)) == []
