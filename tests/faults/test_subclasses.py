"""Tensor subclasses: what their storage holds is not their value, so nothing reads it as memory."""

import pytest
import torch
from oracle import compiled
from torch import fx, nn
from torch.testing._internal.two_tensor import TwoTensor
from wrappers import Nested, Pair, Rounded, Scaled, Shifted, scaled

import pure_backend
from pure_backend.backend import assume_pure

aten = torch.ops.aten

WRAPPERS = {
    "scaled": scaled,
    "shifted": lambda: Shifted.of(torch.arange(12.0).reshape(4, 3), 0.5),
    "nested": lambda: Nested.of(scaled(), torch.ones(4, 3)),
    "nested twice": lambda: Nested.of(Nested.of(scaled(), torch.ones(4, 3)), torch.ones(1)),
}


def linear(x, w):
    return nn.functional.linear(x, w).sin() + 1


def one_program(calls: int = 1) -> None:
    """Assert that all ran in programs: each graph was traced once, and called so often."""
    statistics = pure_backend.statistics()
    assert (statistics.traces, statistics.calls) == (1, calls)


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_an_input(name, parameter):
    """The value is that of eager, which calls `__torch_dispatch__`; the same program for other values."""
    w = WRAPPERS[name]()
    w = nn.Parameter(w, requires_grad=False) if parameter else w
    call = compiled(linear)
    for x in (torch.ones(2, 3), torch.ones(2, 3) * 2, torch.arange(6.0).reshape(2, 3)):
        torch.testing.assert_close(call(x, w), linear(x, w))
    one_program(3)


def gradients(call, x, w):
    """The gradients of both, as `backward` leaves them."""
    x = x.clone().requires_grad_()
    w.grad = None
    call(x, w).pow(2).sum().backward()
    return x.grad, w.grad


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients(name, trained, device):
    """Those of eager, for the wrapper too, in one forward and one backward."""
    x, w = torch.randn(2, 3), WRAPPERS[name]().requires_grad_(trained)
    want = gradients(linear, x, w)
    moved = w.detach().to(device).requires_grad_(trained)
    assert type(moved) is type(w)
    got = gradients(compiled(linear), x.to(device), moved)
    one_program(2)
    for a, b in zip(want, got, strict=True):
        assert type(a) is type(b)
        torch.testing.assert_close(b if b is None else b.cpu(), a, rtol=1e-4, atol=1e-4)


def test_a_wrapper_used_more_than_once():
    """Equal uses are traced by torch once; gradients of all kinds add up."""

    def f(x, w):
        for _ in range(3):
            x = linear(x, w)[:, :3]
        return x.sum() + (w * 2).mean()

    x, w = torch.randn(2, 3), scaled().requires_grad_()
    want, got = gradients(f, x, w), gradients(compiled(f), x, w)
    one_program(2)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_the_gradient_is_that_of_eager_and_not_of_what_the_operators_do():
    """Rounding has no derivative; eager differentiates the product, then rounds in its backward."""
    x, w = torch.randn(2, 3), Rounded.of(torch.randn(4, 3))
    want = gradients(linear, x, w)
    assert want[0].abs().sum() > 0
    torch.testing.assert_close(gradients(compiled(linear), x, w)[0], want[0])
    one_program(2)


def test_gradient_of_an_outer_class():
    """A `TwoTensor` trains: its gradient is one too."""

    def f(x, w):
        return (x @ w.sin()).sum() * 2 + (w * w).sum()

    results = []
    for call in (f, compiled(f)):
        w = nn.Parameter(TwoTensor(torch.arange(6.0).reshape(3, 2), torch.ones(3, 2)))
        x = TwoTensor(torch.ones(2, 3), torch.ones(2, 3) * 2)
        loss = call(x, w)
        results.append(loss.detach())
        loss.backward()
        results.append(w.grad)
    for want, got in zip(results[:2], results[2:], strict=True):
        assert type(want) is type(got) is TwoTensor
        torch.testing.assert_close((got.a, got.b), (want.a, want.b))


def test_wrappers_between_nodes_and_as_results():
    """What is made in the graph is taken apart with the nodes that use it; what leaves is wrapped again, once an object."""

    def f(x, t):
        y = t * 2 + x.sin()
        a, b = y.chunk(2)
        return a @ b.t(), a, a, t, x.cos()

    x, t = torch.randn(4, 3), TwoTensor(torch.randn(4, 3), torch.randn(4, 3))
    want, got = f(x, t), compiled(f)(x, t)
    one_program()
    for a, b in zip(want[:4], got[:4], strict=True):
        assert type(b) is TwoTensor
        torch.testing.assert_close((b.a, b.b), (a.a, a.b))
    torch.testing.assert_close(got[4], want[4])
    assert got[1] is got[2] and got[3] is t


def test_metadata_is_part_of_the_signature():
    """Two that differ in it alone do not share a program; neither do 1 and True, or 0.0 and -0.0."""
    seen = []

    @torch.compiler.disable
    def run(call, x, by):
        return call(x, Shifted.of(torch.zeros(4, 3), by))

    call = assume_pure_once(lambda x, w: x / w, torch.ones(4, 3), Shifted.of(torch.zeros(4, 3), 1.0))
    for by in (1.0, 2.0, 1.0, 0.0, -0.0, True):
        seen.append(run(call, torch.ones(4, 3), by))
        torch.testing.assert_close(seen[-1], torch.ones(4, 3) / (torch.zeros(4, 3) + by))


def assume_pure_once(f, *args):
    """What the backend makes of a function's graph, without Dynamo's guards in front of it."""
    graph = fx.symbolic_trace(f)
    graph.graph.output_node().args = ((graph.graph.output_node().args[0],),)
    graph.recompile()
    call = assume_pure(graph, args)
    return lambda *args: call(*args)[0]


def test_inner_tensors_are_read_at_every_call():
    """Swapped, changed in place, of another shape: nothing is remembered of a wrapper."""
    call = assume_pure_once(linear, torch.ones(2, 3), scaled())
    w, x = scaled(), torch.ones(2, 3)
    for change in (
        lambda: None,
        lambda: w.q.mul_(2),
        lambda: setattr(w, "q", w.q.clone().neg_()),
        lambda: setattr(w, "s", torch.tensor(0.25)),
        lambda: setattr(w, "s", torch.ones(4, 3) * 3),
    ):
        change()
        torch.testing.assert_close(call(x, w), linear(x, w))


def test_writes_to_inner_tensors():
    """They are the caller's afterwards."""

    def f(t, x):
        t.add_(x).mul_(2)
        return t.sin(), x + 1

    x, made = torch.ones(3), lambda: TwoTensor(torch.arange(3.0), torch.ones(3))
    want, got = made(), made()
    results = f(want, x), compiled(f)(got, x)
    torch.testing.assert_close((got.a, got.b), (want.a, want.b))
    torch.testing.assert_close((results[1][0].a, results[1][0].b), (results[0][0].a, results[0][0].b))
    one_program()


def test_a_wrapper_written_in_place_stays_one_object():
    def f(t):
        u = t.mul_(2)
        return u, t.add_(1), (t * 2)

    t = TwoTensor(torch.ones(3), torch.zeros(3))
    results = compiled(f)(t)
    assert results[0] is t and results[1] is t
    torch.testing.assert_close((t.a, t.b, results[2].a), (torch.full((3,), 3.0), torch.ones(3), torch.full((3,), 6.0)))


def written_beside(x, w):
    y = x * 1
    return (w @ y.t()).sum() + y.add_(w.sum()).sum()


def viewed_beside(x, w):
    y = (w @ x.t()) * 2
    z = x.view(-1)
    return (w @ z.view(2, 3).t()).sum() + y.sum(), z


@pytest.mark.parametrize("f", [written_beside, viewed_beside])
def test_writes_and_views_beside_a_recorded_node(f):
    """What the node hands out shares memory, or history, with what it was given."""
    found = []
    for call in (f, compiled(f)):
        torch.manual_seed(5)
        x = torch.randn(2, 3, requires_grad=True)
        result = call(x, scaled())
        (result[0] if isinstance(result, tuple) else result).backward()
        found.append(x.grad)
        assert not isinstance(result, tuple) or result[1].data_ptr() == x.data_ptr()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


class Refused(Pair):
    """An in-place operator replaces what it holds."""

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is aten.mul_.Tensor:
            args[0].a, args[0].b = args[0].a * args[1], args[0].b * args[1]
            return args[0]
        return super().__torch_dispatch__(op, types, args, kwargs)


def test_inner_tensors_that_an_operator_replaces(caplog):
    def f(t):
        t.mul_(3)
        return t + 1

    t = Refused.of(torch.ones(3), torch.zeros(3))
    got = compiled(f)(t)
    torch.testing.assert_close((t.a, got.a, got.b), (torch.full((3,), 3.0), torch.full((3,), 4.0), torch.ones(3)))
    assert "other inner tensors" in caplog.text


def test_a_float_that_changes():
    """It stays a float of the call, whatever it is next to."""

    def f(x, w, scale):
        return nn.functional.linear(x * scale, w) + (w * scale).sum()

    call, x, w = compiled(f), torch.ones(2, 3), scaled()
    for scale in (0.5, 0.25, 3.0):
        torch.testing.assert_close(call(x, w, scale), f(x, w, scale), rtol=1e-4, atol=1e-4)


def test_inner_tensors_that_overlap():
    """A write to one is a write to the other; another overlap is another plan."""

    def f(t, u):
        t.neg_()
        return t - u

    memory = torch.arange(8.0) + 1
    call = assume_pure_once(f, memory[:4], memory[2:6])
    for start in (2,):
        want, got = memory.clone(), memory.clone()
        a = f(Pair.of(want[:4], want[4:]), want[start : start + 4])
        b = call(Pair.of(got[:4], got[4:]), got[start : start + 4])
        torch.testing.assert_close((b.a, b.b, got), (a.a, a.b, want))


def test_the_report_shows_a_program():
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(scaled(), requires_grad=False)
    report = pure_backend.explain(model)(torch.ones(2, 3))
    assert (len(report.graphs), len(report.partitions), report.graphs[0].impurities) == (1, 1, ())


def test_verified():
    """`verify` compares the plain graph node by node, and its backward."""
    x, w = torch.randn(2, 3), scaled()
    got = gradients(compiled(linear, options={"verify": True}), x, w)
    torch.testing.assert_close(got[0], gradients(linear, x, w)[0])


class Product(torch.autograd.Function):
    """`x @ w.T` for a frozen `w`, as QLoRA writes it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w
        return x @ w.value().t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.w.value() * 3, None


def test_in_an_autograd_function():
    """Its own backward is the gradient."""

    def f(x, w):
        return Product.apply(x, w).sin()

    x, w = torch.randn(2, 3), scaled()
    want, got = gradients(f, x, w), gradients(compiled(f), x, w)
    one_program(2)
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-3)


def test_under_a_checkpoint():
    def f(x, w):
        return torch.utils.checkpoint.checkpoint(linear, x, w, use_reentrant=False)

    x, w = torch.randn(2, 3), scaled()
    torch.testing.assert_close(gradients(compiled(f), x, w)[0], gradients(f, x, w)[0])


def test_one_that_requires_grad_leaves_the_graph(caplog):
    """Its gradient may be of any class, which is known in the backward only: its nodes run in eager."""
    results = []
    for call in (torch.sin, compiled(lambda t: (t * 2).sin())):
        t = TwoTensor(torch.ones(3), torch.zeros(3)).requires_grad_()
        y = call(t) if call is not torch.sin else (t * 2).sin()
        y.sum().backward()
        results.append(t.grad)
    assert "leaves the graph" in caplog.text
    torch.testing.assert_close((results[1].a, results[1].b), (results[0].a, results[0].b))


def test_a_host_read_beside_a_wrapper():
    """The graph is cut, and its parts take wrappers."""

    def f(x, w):
        y = linear(x, w)
        return linear(y[y > 0.5][:3][None], w) + 1

    x, w = torch.randn(6, 3), scaled()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(compiled(f)(x, w), f(x, w))


def test_autocast():
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.linear(x, w) * 2

    x, w = torch.randn(2, 3), scaled()
    torch.testing.assert_close(compiled(f)(x, w), f(x, w), rtol=1e-2, atol=1e-2)


def test_a_training_step_with_a_frozen_wrapper():
    """`TrainStep` trains what is beside it."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Parameter(scaled(), requires_grad=False)
            self.adapter = nn.Linear(3, 4)

        def forward(self, x):
            return nn.functional.linear(x, self.frozen) + self.adapter(x)

    x, losses = torch.randn(5, 3), []
    for own in (False, True):
        torch.manual_seed(3)
        model = Adapted()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        step = pure_backend.TrainStep(model, optimizer, nn.functional.mse_loss)
        losses.append([])
        for _ in range(3):
            if own:
                losses[-1].append(step(x, torch.ones(5, 4)))
                continue
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), torch.ones(5, 4))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0])


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
