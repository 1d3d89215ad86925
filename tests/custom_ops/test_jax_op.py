"""JAX functions as torch operators, against their torch references, in every way that torch calls an operator."""

import enum
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from oracle import agree, compiled

import pure_backend
from pure_backend import jax_op


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


@jax_op("ops_test::wave")
def wave(x: jax.Array, by: float = 2.0) -> jax.Array:
    """`sin(x) * by`."""
    return jnp.sin(x) * by


@jax_op("ops_test::statics")
def statics(
    x: jax.Array,
    bias: jax.Array | None,
    parts: list[jax.Array],
    axes: tuple[int, ...],
    dtype: jnp.dtype = jnp.float32,
    side: Side = Side.LEFT,
    mode: Literal["sum", "mean"] = "sum",
    *,
    scale: float | None = None,
    negate: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """One of every kind of parameter."""
    total = sum(parts, x if bias is None else x + bias)
    total = total * (1 if side is Side.LEFT else -1) * (1 if scale is None else scale) * (-1 if negate else 1)
    return getattr(jnp, mode)(total, axes).astype(dtype), jnp.argmax(x, -1)


@jax_op("ops_test::pieces")
def pieces(x: jax.Array, n: int) -> list[jax.Array]:
    """`x` cut into n parts."""
    return jnp.split(x, n)


def _double_plus(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] * 2 + y_ref[...]


@jax_op("ops_test::double_plus")
def double_plus(x: jax.Array, y: jax.Array) -> jax.Array:
    """`2 x + y` in a Pallas kernel, which has no gradient of its own."""
    return pl.pallas_call(_double_plus, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


double_plus.register_vjp(lambda x, y: (double_plus._fn(x, y), None), lambda _, ct: (2 * ct, ct))


@jax_op("ops_test::maybe")
def maybe(x: jax.Array, on: bool) -> jax.Array:
    """`x + 1`, or `x` itself."""
    return x + 1 if on else x


@jax_op("ops_test::put_row_", mutates_args=("cache",))
def put_row_(cache: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    """Write a row of a cache."""
    return jax.lax.dynamic_update_slice(cache, row[None], (index, jnp.zeros_like(index)))


@jax_op("ops_test::swap_", mutates_args=("b", "a"))
def swap_(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Exchange two arrays; returns their sum."""
    return a, b, a + b


@jax_op("ops_test::use_up", donate_argnames="x")
def use_up(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x + y` in the memory of `x`."""
    return x + y


def numbers(*shape, grad=False, dtype=torch.float32):
    torch.manual_seed(3)
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


@pytest.fixture(params=["eager", "assume_pure", "opaque"])
def way(request, device):
    """How a function of operators is run: eagerly, compiled by us, or compiled by a backend that sees opaque operators."""
    if request.param == "eager":
        return lambda f: f
    other = "openxla" if device.type == "xla" else "inductor"
    backend = request.param if request.param == "assume_pure" else other
    return lambda f: torch.compile(f, backend=backend, fullgraph=True)


# ------------------------------------------------------------------------------------------------------------ functional


def test_values_and_gradients(way, device):
    x = numbers(4).to(device).requires_grad_()
    a, b = (numbers(8, 128).to(device).requires_grad_() for _ in range(2))

    def f(x, a, b):
        return wave(x, 3.0).sum() + (double_plus(a, b) * 5).sum()

    out = way(f)(x, a, b)
    out.backward()
    torch.testing.assert_close(out.cpu(), (3 * x.sin()).sum().cpu() + 5 * (2 * a + b).sum().cpu(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(x.grad.cpu(), 3 * x.detach().cpu().cos())
    assert a.grad.cpu().unique().tolist() == [10] and b.grad.cpu().unique().tolist() == [5]


def test_every_kind_of_parameter(way, device):
    x, bias, part = (numbers(2, 3).to(device) for _ in range(3))

    def f(x, bias, part):
        one = statics(x, None, [], (0,))
        two = statics(x, bias, [part, part], (0, 1), torch.float16, "RIGHT", "mean", scale=2.0, negate=True)
        return one, two

    (one, where), (two, _) = way(f)(x, bias, part)
    torch.testing.assert_close(one.cpu(), x.sum(0).cpu())
    assert where.dtype is torch.int64 and where.tolist() == x.argmax(-1).tolist()
    assert two.dtype is torch.float16
    torch.testing.assert_close(two.cpu().float(), 2 * (x + bias + 2 * part).mean().cpu(), rtol=1e-2, atol=1e-2)


def test_lists_come_back_as_lists(way, device):
    got = way(lambda x: pieces(x, 3))(numbers(6, 2).to(device))
    assert isinstance(got, list) and [tuple(part.shape) for part in got] == [(2, 2)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype, device):
    agree_with = numbers(5, dtype=torch.float32).to(dtype)
    got = wave(agree_with.to(device), 2.0)
    assert got.dtype is dtype
    torch.testing.assert_close(got.cpu(), 2 * agree_with.sin(), rtol=1e-2, atol=1e-2)


def test_strided_and_empty_tensors():
    torch.testing.assert_close(wave(numbers(3, 4).t()[1:]), 2 * numbers(3, 4).t()[1:].sin())
    assert wave(torch.empty(0, 3)).shape == (0, 3)


def test_gradients_of_any_order():
    x = numbers(4, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(wave, (x,))
    assert torch.autograd.gradgradcheck(wave, (x,))


def test_the_gradient_is_kept_from_where_it_is_not_wanted():
    x, y = numbers(8, 128, grad=True), numbers(8, 128)
    double_plus(x, y).sum().backward()
    assert y.grad is None
    with torch.no_grad():
        assert not wave(x).requires_grad
    assert not statics(numbers(2, 3), None, [], (0,))[1].requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(wave(torch.ones(3)), 2 * torch.ones(3).sin())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in jacfwd
def test_functorch():
    x = numbers(4)
    torch.testing.assert_close(torch.vmap(wave)(numbers(3, 4)), 2 * numbers(3, 4).sin())
    torch.testing.assert_close(torch.vmap(wave, in_dims=1)(numbers(3, 4)), 2 * numbers(3, 4).sin().t())
    torch.testing.assert_close(torch.func.grad(lambda v: wave(v).sum())(x), 2 * x.cos())
    torch.testing.assert_close(torch.vmap(torch.func.grad(lambda v: wave(v).sum()))(numbers(3, 4)), 2 * numbers(3, 4).cos())
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(wave)(x), torch.diag(2 * x.cos()))
    torch.testing.assert_close(torch.func.hessian(lambda v: wave(v).sum())(x), torch.diag(-2 * x.sin()))
    batch = [part.sum() for part in torch.vmap(lambda v: tuple(pieces(v, 2)))(numbers(3, 4))]
    torch.testing.assert_close(sum(batch), numbers(3, 4).sum())


def test_inside_transforms_of_a_compiled_function(device):
    agree(lambda x: torch.vmap(lambda v: wave(v).sum())(x), lambda: (numbers(3, 4, grad=True),), device=device, grad=True)


def test_checkpoint_and_autocast(device):
    from torch.utils.checkpoint import checkpoint

    def f(x):
        return checkpoint(lambda v: wave(v.exp()), x, use_reentrant=False).sum()

    agree(f, lambda: (numbers(4, grad=True),), device=device, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert wave(torch.ones(3)).dtype is torch.float32


def test_export():
    class Model(torch.nn.Module):
        def forward(self, x):
            return wave(x) + 1

    program = torch.export.export(Model(), (numbers(3),))
    assert "ops_test.wave" in str(program.graph)
    torch.testing.assert_close(program.module()(numbers(3)), 2 * numbers(3).sin() + 1)


def test_straight_into_jax(device):
    """Inside the backend the kernel is part of the one program, not a call between two."""
    c = compiled(lambda x, y: double_plus(x.sin(), y).cos() + 1)
    c(numbers(8, 128).to(device), numbers(8, 128).to(device))
    assert pure_backend.statistics().lowerings == 1


def test_shapes_that_change(device):
    c = compiled(lambda x: wave(x) + x.shape[0], dynamic=True)
    for n in (3, 5, 3):
        torch.testing.assert_close(c(torch.ones(n, device=device)).cpu(), 2 * torch.ones(n).sin() + n)


def test_opcheck():
    x = numbers(2, 3, grad=True)
    passed = dict.fromkeys(
        ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"), "SUCCESS"
    )
    for op, args in (
        (wave, (x, 3.0)),
        (statics, (x, None, [x, x], (0,))),
        (pieces, (x, 2)),
        (double_plus, (numbers(8, 128, grad=True), numbers(8, 128))),
        (maybe, (x, False)),
        (put_row_, (torch.zeros(4, 3), torch.ones(3), torch.tensor(1))),
        (swap_, (torch.zeros(3), torch.ones(3))),
        (use_up, (x, x.detach().clone())),
    ):
        assert torch.library.opcheck(op._opoverload, args) == passed, op


def test_one_trace_a_signature():
    pure_backend.reset_statistics()
    for i in range(3):
        wave(torch.full((7,), float(i)), 1.5)
    assert pure_backend.statistics().traces == 1
    wave(torch.ones(7), 1.25)
    wave(torch.ones(8), 1.25)
    assert pure_backend.statistics().traces == 3


def test_a_gradient_of_its_own_comes_before_the_first_call():
    @jax_op("ops_test::late")
    def late(x: jax.Array) -> jax.Array:
        return 2 * x

    x = torch.ones(2, requires_grad=True)
    late.register_vjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))
    late(x).sum().backward()
    assert x.grad.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="ops_test::late: register_vjp must come before the first call"):
        late.register_vjp(lambda x: (2 * x, None), lambda _, ct: (ct,))


def test_b08_a_result_that_is_an_argument(way, device):
    """B08 https://github.com/pytorch/pytorch/issues/134278"""
    x = torch.zeros(3, device=device)
    y = way(lambda x: maybe(x, False))(x)
    y.add_(1)
    assert x.tolist() == [0, 0, 0] and y.tolist() == [1, 1, 1]


def test_b14_wrong_arity():
    """B14 https://github.com/pytorch/xla/issues/7599"""
    with pytest.raises(TypeError, match=r"ops_test::double_plus\(\) is missing 'y'"):
        double_plus(torch.ones(8, 128))
    with pytest.raises(TypeError, match=r"ops_test::wave\(\) takes \['x', 'by'\]"):
        wave(torch.ones(8), 2.0, 3.0)
    with pytest.raises(TypeError, match="colour"):
        wave(torch.ones(8), colour=1)


# --------------------------------------------------------------------------------------------------------- registration


def unannotated(x: jax.Array, y) -> jax.Array:
    return x


def starred(*xs: jax.Array) -> jax.Array:
    return xs[0]


def strange(x: jax.Array, y: set) -> jax.Array:
    return x


def silent(x: jax.Array):
    return x


@pytest.mark.parametrize(
    "fn, message",
    [
        (unannotated, "parameter 1 .'y'. has no annotation"),
        (starred, "is .args or ..kwargs"),
        (strange, "parameter 1 .'y'. is annotated <class 'set'>"),
        (silent, "the return annotation is"),
    ],
)
def test_functions_without_a_schema(fn, message):
    with pytest.raises(TypeError, match=f"bad::{fn.__name__}.*{message}"):
        jax_op(f"bad::{fn.__name__}", fn)


@pytest.mark.parametrize("name", ["name", "a::b::c", "::b", "a::", "a::b c"])
def test_bad_names(name):
    with pytest.raises(ValueError, match="namespace::operator"):
        jax_op(name, silent)


def test_bad_parameters():
    def fine(x: jax.Array, n: int) -> jax.Array:
        return x

    for wrong in (
        {"donate_argnames": "z"},
        {"donate_argnums": 7},
        {"donate_argnames": "n"},
        {"mutates_args": ("n",)},
        {"static_argnames": "x"},
    ):
        with pytest.raises(ValueError, match="bad::fine"):
            jax_op("bad::fine", fine, **wrong)


def test_partials_and_jitted_functions():
    import functools

    def scaled(x: jax.Array, by: int) -> jax.Array:
        return x * by

    assert jax_op("ops_test::by_three", functools.partial(scaled, by=3))(torch.ones(2)).tolist() == [3, 3]
    assert jax_op("ops_test::jitted", jax.jit(scaled, static_argnames="by"))(torch.ones(2), 4).tolist() == [4, 4]


# ------------------------------------------------------------------------------------------------------------- in place


def test_written_in_place(way, device):
    cache = torch.zeros(4, 3, device=device)
    old_view, address = cache[1], cache.data_ptr()

    def f(cache, row, index):
        put_row_(cache, row, index)
        return cache.sum()

    out = way(f)(cache, torch.ones(3, device=device), torch.tensor(1, device=device))
    assert out.item() == 3
    assert old_view.tolist() == [1, 1, 1] and cache.cpu().sum().item() == 3
    assert cache.data_ptr() == address


def test_written_through_a_view(device):
    def f(big, row, index):
        put_row_(big[1], row, index)
        put_row_(big.transpose(0, 1)[3], row[:3], index)
        return big.sum((1, 2))

    make = lambda: (torch.zeros(2, 4, 3), torch.ones(3), torch.tensor(1))  # noqa: E731
    agree(f, make, device=device)


def test_several_written_arguments(way, device):
    a, b = torch.zeros(3, device=device), torch.ones(3, device=device)
    total = way(lambda a, b: swap_(a, b) * 2)(a, b)
    assert total.tolist() == [2, 2, 2] and a.tolist() == [1, 1, 1] and b.tolist() == [0, 0, 0]


def test_gradients_through_a_write(device):
    def f(row, index):
        cache = torch.zeros(4, 3, device=row.device)
        put_row_(cache, row * 2, index)
        return (cache * torch.arange(12.0, device=row.device).reshape(4, 3)).sum()

    agree(f, lambda: (numbers(3, grad=True), torch.tensor(2)), device=device, grad=True)
    row = numbers(3, grad=True)
    f(row, torch.tensor(2)).backward()
    assert row.grad.tolist() == [12, 14, 16]


def test_another_shape_for_the_written_argument():
    @jax_op("ops_test::shrink_", mutates_args=("x",))
    def shrink_(x: jax.Array) -> jax.Array:
        return x[:1]

    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"argument 'x' is f32\[1\], the argument f32\[3\]"):
        shrink_(x)
    assert x.tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------------- donation


def test_b01_functional_op_and_copy(device):
    """B01 https://github.com/pytorch/xla/issues/8385"""

    def f(x):
        x.copy_(use_up(x, torch.ones_like(x)))
        return x * 2

    x = torch.zeros(8, 128, device=device)
    c, address = compiled(f, fullgraph=True), x.data_ptr()
    assert [c(x).cpu().unique().item() for _ in range(2)] == [2, 4]
    assert x.cpu().unique().item() == 2 and x.data_ptr() == address


@pytest.mark.parametrize("run", ["eager", "assume_pure"])
def test_donated_with_another_argument(run, device):
    """B03: one memory donated and read, or donated twice."""
    x = torch.ones(4, device=device)
    if run == "eager":
        with pytest.raises(pure_backend.DonationError, match="argument 'x' is donated, but argument 'y' lies in the same"):
            use_up(x, x)
    else:
        assert compiled(lambda x: use_up(x, x))(x).tolist() == [2, 2, 2, 2]


def test_plain_tensors_keep_their_memory():
    x = torch.ones(4)
    assert use_up(x, torch.ones(4)).tolist() == [2] * 4
    assert x.tolist() == [1] * 4
