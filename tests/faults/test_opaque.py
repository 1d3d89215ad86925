"""Nothing of ours is traced by Dynamo: gradients taken inside of compiled functions, and JAX functions called there."""

import copy
import functools

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import pure_backend
from pure_backend import call_jax, jax_op
from tests.oracle import compiled

BACKENDS = ["assume_pure", "aot_eager", "eager"]


def numbers(*shape, device="cpu"):
    torch.manual_seed(3)
    return torch.randn(shape).to(device).requires_grad_()


def gradient_inside(x):
    y = (x * x).sum()
    return torch.autograd.grad(y, x)[0] + 1


def second_derivative_inside(x):
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)[0]


def backward_inside(x):
    leaf = x.detach().requires_grad_()
    (leaf.sin() * x.detach()).sum().backward()
    return leaf.grad


def penalty_inside(x):
    (g,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    return (x.sum() + g.pow(2).sum()).exp()


@pytest.mark.parametrize("f", [gradient_inside, second_derivative_inside, backward_inside, penalty_inside])
def test_gradients_inside_of_a_compiled_function(f, device):
    x = numbers(3, device=device)
    got = [compiled(f)(x) for _ in range(2)]
    for result in got:
        torch.testing.assert_close(result.detach().cpu(), f(numbers(3)).detach())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_our_gradients_between_the_graphs_of_another_backend(backend):
    inner = torch.compiler.disable(compiled(lambda x: (x**3).sum()))  # it stays ours: Dynamo would inline it into the outer one

    def outer(x):
        y = inner(x * 1)
        (g,) = torch.autograd.grad(y, x, create_graph=backend == "eager")  # AOTAutograd has no second derivative
        return torch.autograd.grad(g.sum(), x)[0] if backend == "eager" else g * 2

    x = numbers(3)
    want = (6 * x if backend == "eager" else 6 * x**2).detach()
    torch.testing.assert_close(torch.compile(outer, backend=backend)(x).detach(), want)


def model(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False))


@pytest.mark.parametrize("width", [8, 512])
def test_a_whole_step_under_compile(width):
    net = model(width)
    reference = copy.deepcopy(net)

    def step(net, x):
        loss = net(x).pow(2).mean()
        loss.backward()
        return loss

    fast = compiled(step)
    for turn in range(3):
        x = torch.randn(2, 64, width, generator=torch.Generator().manual_seed(turn))
        torch.testing.assert_close(fast(net, x), step(reference, x))
        with torch.no_grad():
            for p, q in zip(net.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
                p.sub_(p.grad)
                q.sub_(q.grad)
        net.zero_grad()
        reference.zero_grad()


def test_an_optimizer_step_under_compile():
    net = model(8)
    reference = copy.deepcopy(net)

    def train(net, optimizer, x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    fast = compiled(train)
    for one, run in ((net, fast), (reference, train)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            run(one, optimizer, torch.ones(2, 8))
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_backward_of_known_shapes_makes_no_graph_anew():
    def step(x):
        y = (x * x).sum()
        return torch.autograd.grad(y, x)[0] + 1

    fast = compiled(step)
    fast(numbers(3))
    before = pure_backend.statistics()
    frames = torch._dynamo.utils.counters["frames"]["total"]
    fast(numbers(3))
    after = pure_backend.statistics()
    assert (after.traces, after.lowerings) == (before.traces, before.lowerings)
    assert torch._dynamo.utils.counters["frames"]["total"] == frames


class Scaled:
    def __init__(self, by):
        self.by = by

    def times(self, a):
        return a * self.by

    def __call__(self, a):
        return a * self.by


def with_own_vjp():
    f = jax.custom_vjp(lambda a: a * 2)
    f.defvjp(lambda a: (a * 2, None), lambda _, g: (g * 5,))
    return f


def with_own_jvp():
    f = jax.custom_jvp(lambda a: a * 2)
    f.defjvps(lambda t, ans, a: t * 7)
    return f


CALLABLES = {
    "ufunc": (lambda: jnp.sin, 0.5403),
    "jax.numpy function": (lambda: jnp.cumsum, None),
    "jit": (lambda: jax.jit(lambda a: a * 2), 2.0),
    "custom_vjp": (with_own_vjp, 5.0),
    "custom_jvp": (with_own_jvp, 7.0),
    "bound method": (lambda: Scaled(3.0).times, 3.0),
    "object": (lambda: Scaled(4.0), 4.0),
    "partial": (lambda: functools.partial(jnp.multiply, 6.0), 6.0),
    "partial of a jit": (lambda: functools.partial(jax.jit(lambda b, a: a * b), 6.0), 6.0),
    "gradient function": (lambda: jax.grad(lambda a: (a**2).sum()), 2.0),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_any_callable_is_called_in_the_graph(name, device):
    check_callable(*CALLABLES[name], "assume_pure", device)


@pytest.mark.parametrize("name", ["ufunc", "custom_vjp", "bound method"])
def test_any_callable_is_called_in_the_graph_of_another_backend(name):
    check_callable(*CALLABLES[name], "aot_eager", "cpu")


def check_callable(make, slope, backend, device):
    function = make()
    x = torch.ones(3, device=device).requires_grad_()
    got = torch.compile(lambda x: call_jax(function, (x.exp().log(),)) + 1, backend=backend, fullgraph=True)(x)
    want = call_jax(function, (x,)) + 1
    torch.testing.assert_close(got, want)
    if slope is not None:
        got.sum().backward()
        torch.testing.assert_close(x.grad.cpu(), torch.full((3,), slope), rtol=1e-3, atol=1e-3)


def test_functions_made_inside():
    def f(x, n, scaled):
        y = call_jax(lambda a: jnp.sin(a), (x,))
        y = call_jax(lambda a: a * n, (y,))
        y = call_jax(lambda a, by=3: a * by, (y,))
        y = call_jax(functools.partial(jnp.add, n), (y,))
        return call_jax(scaled.times, (y,))

    fast = compiled(f, fullgraph=True)
    for n in (2, 3, 5, 0.5):
        for by in (2.0, 4.0):
            want = ((torch.ones(3).sin() * n) * 3 + n) * by
            torch.testing.assert_close(fast(torch.ones(3), n, Scaled(by)), want)


def test_a_jitted_function_made_inside():
    def f(x, n):
        return call_jax(jax.jit(lambda a: jnp.sin(a) + n), (x,))  # Dynamo itself cannot trace `jax.jit`: a graph break

    for n in (1, 2):
        torch.testing.assert_close(compiled(f)(torch.ones(3), n), torch.ones(3).sin() + n)


def test_a_method_of_the_module_itself():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.power = 3

        def raised(self, a):
            return a**self.power

        def forward(self, x):
            return call_jax(self.raised, (x,)) + call_jax(lambda a: a * self.power, (x,))

    x = numbers(4)
    torch.testing.assert_close(compiled(Net())(x), x**3 + x * 3)


def test_a_call_after_a_graph_break(device):
    def f(x):
        torch._dynamo.graph_break()
        return call_jax(jnp.sin, (x,))

    x = numbers(4, device=device)
    torch.testing.assert_close(compiled(f)(x).cpu(), x.cpu().sin())


@jax_op("test_opaque::tripled")
def tripled(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_called_between_graphs(backend):
    """The kernel, its gradient and its batched form run where Dynamo looks at every frame."""

    def f(x):
        torch._dynamo.graph_break()
        y = tripled(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        h = torch.vmap(tripled)(x.detach())
        torch._dynamo.graph_break()
        return y + g + h

    x = numbers(2, 3)
    want = (6 * x.sin() + 3 * x.cos()).detach()
    torch.testing.assert_close(torch.compile(f, backend=backend)(x).detach(), want)


def test_tensors_that_die_between_graphs():
    """The callback of a weak reference is a frame like any other."""

    def f(x):
        y = x * 2
        torch._dynamo.graph_break()
        z = compiled_inner(y) + 1
        del y
        torch._dynamo.graph_break()
        return z

    compiled_inner = compiled(lambda y: y.sin())
    for _ in range(3):
        torch.testing.assert_close(torch.compile(f, backend="eager")(torch.ones(3)), torch.full((3,), 2.0).sin() + 1)


def test_the_config_of_dynamo_is_left_alone():
    before = torch._dynamo.config.get_config_copy()
    compiled(gradient_inside)(numbers(3))
    assert torch._dynamo.config.get_config_copy() == before
