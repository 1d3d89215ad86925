"""Tensor subclasses: what their storage holds is not their value, so nothing reads it as memory."""

import pytest
import torch
from oracle import compiled
from torch import nn
from wrappers import Nested, Scaled, Shifted, scaled

import pure_backend

WRAPPERS = {
    "scaled": scaled,
    "shifted": lambda: Shifted.of(torch.arange(12.0).reshape(4, 3), 0.5),
    "nested": lambda: Nested.of(scaled(), torch.ones(4, 3)),
    "nested twice": lambda: Nested.of(Nested.of(scaled(), torch.ones(4, 3)), torch.ones(1)),
}


def linear(x, w):
    return nn.functional.linear(x, w).sin() + 1


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_an_input(name, parameter):
    """The value is that of eager, which calls `__torch_dispatch__`."""
    x, w = torch.ones(2, 3), WRAPPERS[name]()
    w = nn.Parameter(w, requires_grad=False) if parameter else w
    for _ in range(2):
        torch.testing.assert_close(compiled(linear)(x, w), linear(x, w))


def test_quantized_by_hand():
    w = Scaled.of(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), torch.tensor(0.5))
    x = torch.ones(1, 2)
    torch.testing.assert_close(compiled(lambda x, w: (x @ w).sin() + 1)(x, w), torch.tensor([[1.909297, 1.14112]]))


class Doubling(torch.Tensor):
    """No wrapper: its memory is its value, and `__torch_function__` is Dynamo's to trace."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is torch.sin else result


@pytest.mark.parametrize("impure", [False, True])
def test_torch_function_is_called_once(impure):
    """Also where the node that Dynamo traced it into runs in eager."""

    def f(x, t):
        y = torch.sin(t) * x
        return y[y > 0] if impure else y

    x, t = torch.ones(3), torch.ones(3).as_subclass(Doubling)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(torch.Tensor(compiled(f)(x, t)), torch.Tensor(f(x, t)))


def jagged(values, offsets):
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def test_jagged_tensor_made_inside():
    """Its nodes run in eager."""
    values, offsets = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 3])

    def f(values, offsets):
        return (jagged(values.sin(), offsets) * 2).values().cos()

    torch.testing.assert_close(compiled(f)(values, offsets), f(values, offsets))


def test_jagged_tensor_given(caplog):
    given, weight = jagged(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 3])), torch.ones(4, 2)
    got = compiled(nn.functional.linear)(given, weight)
    torch.testing.assert_close(got.values(), nn.functional.linear(given, weight).values())
    assert got.is_nested
    assert "nested tensor" in caplog.text


@pytest.fixture
def mesh():
    """One process as a mesh."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_tensor(mesh, caplog):
    """A DTensor stays one, and its nodes run in eager."""
    x = torch.distributed.tensor.distribute_tensor(torch.ones(2, 2), mesh, [torch.distributed.tensor.Shard(0)])
    got = compiled(lambda x: x.sin() + 1)(x)
    assert got.placements == x.placements
    torch.testing.assert_close(got.to_local(), torch.ones(2, 2).sin() + 1)
    assert "a DTensor" in caplog.text


def test_a_gradient_of_another_class():
    """What reaches the backward of a program must be plain too: a clear error, never its memory."""
    x = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(pure_backend.PureBackendError, match="given a Scaled"):
        compiled(lambda x: x.sin())(x).backward(scaled())
