"""A private copy of Dynamo's graph."""

import torch
from torch import fx

from pure_backend.pipeline import normalize


def test_attributes_are_lifted_and_the_original_is_kept():
    class M(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((2,), 3.0))

        def forward(self, x):
            return x * self.scale + self.scale

    gm = fx.symbolic_trace(M())
    before = str(gm.graph)
    normalized = normalize(gm)
    assert str(gm.graph) == before
    assert [n.op for n in normalized.gm.graph.nodes] == [
        "placeholder",
        "placeholder",
        "call_function",
        "call_function",
        "output",
    ]
    gm.scale = torch.full((2,), 5.0)
    assert normalized.read_lifted()[0].tolist() == [5.0, 5.0]
