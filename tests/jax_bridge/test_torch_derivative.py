"""Torch's own derivative, traced and given to JAX."""

import pytest
import torch
from oracle import agree, compiled
from torch.utils import _pytree as pytree

from pure_backend.jax_bridge.decompose import FakeCall
from pure_backend.jax_bridge.torch_derivative import backward_graph


def _backward(op, *args, **kwargs):
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return backward_graph(FakeCall(op, tuple(leaves), spec))


def _targets(gm) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_the_backward_reads_the_results_instead_of_computing_them_again() -> None:
    gm = _backward(torch.std, torch.empty(4, 3), 0)
    assert "aten.std.correction" not in _targets(gm)
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == ["arg0_1", "result_0", "arg1_1"]


def test_an_argument_that_has_no_gradient_gets_zeros() -> None:
    """The weight of a loss: autograd refuses to differentiate by it."""
    gm = _backward(torch.nn.functional.binary_cross_entropy, torch.empty(3), torch.empty(3), torch.empty(3))
    assert len(gm.graph.output_node().args[0]) == 3


def test_a_tensor_given_twice_is_one_input() -> None:
    x = torch.empty(3)
    assert len(_backward(torch.xlogy, x, x).graph.output_node().args[0]) == 1


SECOND = {
    "x log y": lambda x: torch.xlogy(x, x.detach() + 1) * x,
    "deviation": lambda x: x.std() * x,
    "log add exp": lambda x: torch.logaddexp(x, 2 * x),
    "logit": torch.logit,
    "norm": lambda x: torch.linalg.vector_norm(x, 3) * x,
    "gelu": torch.nn.functional.gelu,
    "softplus": torch.nn.functional.softplus,
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name: str) -> None:
    def second(f):
        x = torch.tensor([0.2, 0.4, 0.7], requires_grad=True)
        (grad,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad((grad * torch.tensor([1.0, 2.0, 3.0])).sum(), x)[0]

    torch.testing.assert_close(second(compiled(lambda x: SECOND[name](x))), second(SECOND[name]), rtol=1e-4, atol=1e-5)


def test_in_place_and_integers() -> None:
    def f(x, n):
        y = x * 1
        y.xlogy_(x.detach())
        return y, n.clone().remainder_(3)

    agree(f, lambda: (torch.tensor([0.0, 0.5, 2.0], requires_grad=True), torch.tensor([4, -4])), grad=True, pure=True)
