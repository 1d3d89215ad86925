"""Arguments that functions of this package take as their models do: None, numbers, nothing at all, tuples."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from pure_backend import fori_loop, jax_op, scan, scan_layers, while_loop


def unrolled(fn, init, xs):
    """What `scan` computes, written out; numbers among the ys are tensors of the others' dtype."""
    carry, ys = init, []
    for x in xs:
        carry, y = fn(carry, x)
        ys.append(y)
    return carry, ys


def test_none_as_y():
    xs = torch.arange(6.0).reshape(3, 2)
    carry, ys = scan(lambda c, x: (c + x, None), torch.zeros(2), xs)
    assert carry.tolist() == [6, 9] and ys is None


def test_none_among_ys_and_in_the_carry():
    xs = torch.arange(6.0).reshape(3, 2)

    def body(carry, x):
        total, nothing = carry
        assert nothing is None
        return (total + x, None), {"a": None, "b": (total * 2, None)}

    (total, nothing), ys = scan(body, (torch.zeros(2), None), xs)
    assert total.tolist() == [6, 9] and nothing is None
    assert ys["a"] is None and ys["b"][1] is None and ys["b"][0].tolist() == [[0, 0], [0, 2], [4, 8]]


@pytest.mark.parametrize("reverse", [False, True])
def test_none_as_carry(reverse, device):
    xs = torch.arange(6.0).reshape(3, 2).to(device)
    carry, ys = scan(lambda c, x: (c, x * 2), None, xs, reverse=reverse)
    assert carry is None and ys.tolist() == (xs * 2).tolist()


def test_none_with_gradients_checkpoint_and_unroll():
    xs = torch.arange(8.0).reshape(4, 2).requires_grad_()
    carry, ys = scan(lambda c, x: ((c[0] + x.sin(), None), None), (torch.zeros(2), None), xs, checkpoint=True, unroll=2)
    carry[0].sum().backward()
    torch.testing.assert_close(xs.grad, xs.detach().cos())
    assert ys is None


def test_none_inside_of_a_compiled_function():
    def f(xs):
        return scan(lambda c, x: (c + x, None), torch.zeros(2), xs)[0]

    call = torch.compile(f, backend="assume_pure", fullgraph=True)
    assert call(torch.ones(3, 2)).tolist() == [3, 3]


def test_none_in_other_loops():
    assert while_loop(lambda i, n: i < 3, lambda i, n: (i + 1, n), (torch.tensor(0), None))[1] is None
    total, nothing = fori_loop(0, 3, lambda i, v: (v[0] + i, None), (torch.zeros(()), None))
    assert total == 3 and nothing is None


BODIES = {
    "sum": lambda c, x: (c + x, c),
    "scaled": lambda c, x: (c * 0.5 + x, x * c),
    "widened": lambda c, x: (c + x.float(), c),
    "method": lambda c, x: (x.add(c), x + c),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("number", [0.0, 1])
@pytest.mark.parametrize("name", BODIES)
def test_a_number_as_carry_has_the_dtype_of_the_loop_written_out(name, number, dtype):
    compare(BODIES[name], number, torch.arange(4).to(dtype))


def test_a_number_as_carry_beside_16_bit_floats(device):
    compare(BODIES["sum"], 0.0, torch.arange(4).to(torch.bfloat16).to(device))


def compare(body, number, xs):
    """`scan` against the loop written out."""
    got, got_ys = scan(body, number, xs)
    want, want_ys = unrolled(body, number, xs.cpu())
    assert got.dtype == want.dtype and got.device == xs.device
    torch.testing.assert_close(got.cpu(), want)
    last = want_ys[-1]
    assert got_ys.dtype == last.dtype
    torch.testing.assert_close(got_ys[-1].cpu(), last)


def test_a_body_that_takes_the_number_for_a_tensor():
    carry, _ = scan(lambda c, x: (c.clone() + x, c.sum()), 0.0, torch.ones(3))
    assert carry == 3


def test_numbers_beside_tensors_that_only_the_body_reads(device):
    w = torch.full((), 2.0, device=device, dtype=torch.float64)
    assert fori_loop(0, 3, lambda i, v: v + w, 0.0).item() == 6
    last = while_loop(lambda v: (v < 5).reshape(()), lambda v: (v + w,), (0.0,))[0]
    assert last.item() == 6 and last.dtype is torch.float64 and last.device == w.device


def test_no_layers():
    x = torch.ones(2)
    assert scan_layers([], x) is x
    assert scan_layers(nn.ModuleList(), (x, x))[0] is x
    assert torch.equal(torch.compile(lambda x: scan_layers([], x) + 1, backend="assume_pure")(x), x + 1)


@jax_op("faults_interfaces::shaped")
def shaped(
    x: jax.Array,
    shape: tuple[int, ...] = (),
    axes: tuple[int, ...] = (-1, 0),
    flags: tuple[bool, ...] = (True, False),
    scales: tuple[float, ...] = (0.5,),
    name: str = "[1]",
) -> jax.Array:
    """A function with tuples as defaults."""
    assert (axes, flags, name) == ((-1, 0), (True, False), "[1]")
    return jnp.broadcast_to(x * scales[0], shape + x.shape)


def test_tuples_as_defaults(device):
    x = torch.ones(2, device=device, requires_grad=True)
    assert shaped(x).tolist() == [0.5, 0.5]
    assert shaped(x, (3,), scales=(2.0,)).shape == (3, 2)
    assert torch.compile(lambda x: shaped(x, [1]) + 1, backend="assume_pure", fullgraph=True)(x).tolist() == [[1.5, 1.5]]
    shaped(x, (4,)).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_a_list_of_arrays_with_a_default_is_refused():
    def summed(x: jax.Array, others: list[jax.Array] = ()) -> jax.Array:  # type: ignore[assignment]
        return sum(others, x)

    with pytest.raises(TypeError, match=r"'others'.*is a list of arrays with a default"):
        jax_op("faults_interfaces::summed", summed)
