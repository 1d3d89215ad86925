"""A joint graph cut into forward and backward."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pure_backend.fx_passes.split import split


def test_forward_and_backward_give_what_the_joint_graph_gives():
    def joint(x, w, cotangent):
        sine = torch.sin(x)
        return sine * w, cotangent * w * torch.cos(x), cotangent * sine

    x, w, cotangent = torch.rand(3), torch.rand(3), torch.rand(3)
    parts = split(make_fx(joint)(x, w, cotangent), 2, [True], [0, 1])
    (result,), saved = parts.forward(x, w)
    grads = parts.backward(cotangent, *saved)
    for value, wanted in zip((result, *grads), joint(x, w, cotangent), strict=True):
        assert torch.equal(value, wanted)
    assert parts.constants == () and parts.carries == (True,)
    sines = [node for body in (parts.forward, parts.backward) for node in body.graph.nodes if "sin" in str(node.target)]
    assert len(sines) == 1, "what both need is computed once and saved"


def test_an_operand_that_the_graph_does_not_take_gets_its_gradient():
    parts = split(make_fx(lambda x, cotangent: (x * 2, cotangent * 2))(torch.ones(2), torch.ones(2)), 1, [True], [2])
    _, saved = parts.forward(torch.ones(2), None, None)
    assert [None if grad is None else grad.tolist() for grad in parts.backward(torch.ones(2), *saved)] == [None, None, [2, 2]]
