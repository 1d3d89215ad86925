"""What torch's autograd may ask of a compiled function besides one backward: hooks, batches, tangents, and copies that stay."""

import copy
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import pure_backend
from pure_backend import call_jax
from tests.oracle import compiled


def numbers(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False))


def waves(x):
    return x.sin() * x.exp()


def gradients(model, x, call):
    """The loss and all gradients of one call, which are cleared again."""
    model.zero_grad()
    x.grad = None
    loss = call(x).pow(2).mean()
    loss.backward()
    return [loss.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())]


def change_in_place(*models):
    with torch.no_grad():
        for parameters in zip(*(m.parameters() for m in models), strict=True):
            for p in parameters:
                p.mul_(0.9).add_(0.01)


# ---------------------------------------------------------------------------------------------------- saved tensors


def around(f):
    """A function with ordinary operators before and after another one."""
    return lambda x: f(x * 2).cos()


CHECKPOINTS = {
    "alone": lambda f: lambda x: checkpoint(f, x, use_reentrant=False),
    "within a larger one": lambda f: lambda x: checkpoint(around(f), x, use_reentrant=False),
    "reentrant": lambda f: lambda x: checkpoint(f, x, use_reentrant=True),
    "nested": lambda f: lambda x: checkpoint(lambda y: checkpoint(f, y * 2, use_reentrant=False), x, use_reentrant=False),
    "selective": lambda f: lambda x: checkpoint(f, x, use_reentrant=False, context_fn=keeping_products),
}


def keeping_products():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("width", [8, 512])
def test_checkpoint_around_a_compiled_function(kind, width):
    model, x = net(width), numbers(2, 64, width)
    reference, fast = copy.deepcopy(model), compiled(model)
    for _ in range(3):
        want = gradients(reference, x, CHECKPOINTS[kind](reference))
        got = gradients(model, x, CHECKPOINTS[kind](fast))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        change_in_place(model, reference)


def test_hooks_on_any_device(device):
    """(torch's own checkpoint does not know `xla`.)"""
    model, x = net().to(device), numbers(2, 8).detach().to(device).requires_grad_()
    reference = copy.deepcopy(model).cpu()
    fast, packed = compiled(model), []

    def hooked(x):
        with saved_tensors_hooks(lambda t: packed.append(t.device.type) or t.cpu(), lambda t: t.to(device)):
            return fast(x)

    got = gradients(model, x, hooked)
    assert device.type in packed
    torch.testing.assert_close(got, gradients(reference, numbers(2, 8), reference))


def test_a_checkpoint_draws_its_dropout_again():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    x = numbers(4, 64)
    fast = compiled(model)
    torch.manual_seed(1)
    want = gradients(model, x, fast)
    torch.manual_seed(1)
    torch.testing.assert_close(gradients(model, x, CHECKPOINTS["alone"](fast)), want)


def test_statistics_are_written_as_often_as_in_eager():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    reference, x = copy.deepcopy(model), numbers(4, 8)
    for _ in range(2):
        want = gradients(reference, x, CHECKPOINTS["alone"](reference))
        torch.testing.assert_close(gradients(model, x, CHECKPOINTS["alone"](compiled(model))), want)
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


def test_hooks_see_the_tensors_that_the_backward_reads():
    seen = []

    def pack(tensor):
        seen.append(weakref.ref(tensor))
        assert not isinstance(tensor, FakeTensor)
        return tensor.detach().numpy().copy()

    x = numbers(512, 512)
    f = compiled(lambda x: (x @ x).sin())
    for _ in range(2):
        seen.clear()
        with saved_tensors_hooks(pack, torch.from_numpy):
            y = f(x)
        assert len(seen) == 2 and [ref() is None for ref in seen] == [False, True]  # the input lives, the product is let go
        (got,) = torch.autograd.grad(y.sum(), x)
        (want,) = torch.autograd.grad((x @ x).sin().sum(), x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
        with torch.no_grad():
            x.mul_(0.5)


def test_the_backward_reads_what_hooks_give_back():
    x = numbers(3)
    with saved_tensors_hooks(lambda t: t.shape, torch.zeros):
        y = compiled(torch.sin)(x)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1, 1, 1]  # the cosine of zero


def test_second_derivatives_through_hooks():
    x = numbers(3)
    with save_on_cpu():
        (g,) = torch.autograd.grad(compiled(torch.sin)(x).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], -x.detach().sin())


def test_saved_tensors_are_freed_after_the_backward():
    x = numbers(3)
    for hooks in (saved_tensors_hooks(lambda t: t, lambda t: t), saved_tensors_hooks(lambda t: t, lambda t: t)):
        with hooks:
            y = compiled(torch.sin)(x).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()


# ---------------------------------------------------------------------------------------------------- batches


def outer(x, w):
    return (x @ w).tanh(), x.sum() * w


def test_batched_gradients():
    x, w = numbers(3, 4), numbers(4, 2, seed=4)
    cotangents = [torch.randn(5, 3, 2), torch.randn(5, 4, 2)]
    want = torch.autograd.grad(outer(x, w), (x, w), cotangents, is_grads_batched=True)
    got = torch.autograd.grad(compiled(outer)(x, w), (x, w), cotangents, is_grads_batched=True)
    torch.testing.assert_close(got, want)
    (want,) = torch.autograd.grad(outer(x, w)[0], x, cotangents[0], is_grads_batched=True)
    (got,) = torch.autograd.grad(compiled(outer)(x, w)[0], x, cotangents[0], is_grads_batched=True)
    torch.testing.assert_close(got, want)


def test_batched_gradients_on_a_device(device):
    """On accelerators autograd runs the backward in a thread of its own, which does not know the level of the batch."""
    x = torch.randn(3, device=device, requires_grad=True)
    eye = torch.eye(3, device=device)
    (got,) = torch.autograd.grad(compiled(torch.sin)(x), x, eye, is_grads_batched=True)
    torch.testing.assert_close(got.cpu(), x.detach().cpu().cos().diag())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians(strategy):
    x = numbers(4)
    want = torch.autograd.functional.jacobian(waves, x)
    got = torch.autograd.functional.jacobian(compiled(waves), x, vectorize=True, strategy=strategy)
    torch.testing.assert_close(got, want)


def test_hessians():
    def energy(x):
        return waves(x).sum() ** 2

    x = numbers(4)
    want = torch.autograd.functional.hessian(energy, x)
    torch.testing.assert_close(torch.autograd.functional.hessian(compiled(energy), x, vectorize=True), want)


def test_one_program_for_a_batch():
    x, eye = numbers(512), torch.eye(512)
    y = compiled(waves)(x)
    torch.autograd.grad(y, x, eye, is_grads_batched=True, retain_graph=True)
    before = pure_backend.statistics()
    for _ in range(2):
        (got,) = torch.autograd.grad(y, x, eye, is_grads_batched=True, retain_graph=True)
        torch.testing.assert_close(got.diagonal(), (x.exp() * (x.sin() + x.cos())).detach())
    after = pure_backend.statistics()
    assert (after.traces, after.lowerings) == (before.traces, before.lowerings)


@pytest.mark.parametrize("create_graph", [False, True])
def test_vmap_of_a_gradient(create_graph, device):
    x = numbers(3).detach().to(device).requires_grad_()

    def rows(y, x):
        def row(v):
            return torch.autograd.grad(y, x, v, create_graph=create_graph)[0]

        return torch.vmap(row, in_dims=1)(torch.eye(3, device=device))

    got, other = rows(compiled(waves)(x), x), numbers(3)
    want = rows_of_eager = torch.autograd.functional.jacobian(waves, other, create_graph=True)
    torch.testing.assert_close(got.cpu(), want, check_stride=False)
    if create_graph:
        (got,) = torch.autograd.grad(got.sum(), x)
        (want,) = torch.autograd.grad(rows_of_eager.sum(), other)
        torch.testing.assert_close(got.cpu(), want)


def test_vmaps_within_each_other():
    x = numbers(2, 3)
    y, z = compiled(waves)(x), waves(x)
    cotangents = torch.randn(4, 2, 3, 5)

    def batched(out):
        def one(v):
            return torch.autograd.grad(out, x, v, retain_graph=True)[0]

        return torch.vmap(torch.vmap(one, in_dims=2))(cotangents)

    torch.testing.assert_close(batched(y), batched(z))


def test_batched_gradients_after_graphs_of_the_users():
    x = numbers(4)
    for f in (waves, compiled(waves)):
        y = (f(x * 2) * 3).cos()
        (got,) = torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True, create_graph=True)
        (second,) = torch.autograd.grad(got.pow(2).sum(), x)
        if f is waves:
            want = got, second
    torch.testing.assert_close((got, second), want)


def test_batched_gradients_of_random_functions_keep_their_draw():
    x = torch.ones(64, requires_grad=True)
    y = compiled(lambda x: nn.functional.dropout(x, 0.5))(x)
    (got,) = torch.autograd.grad(y, x, torch.eye(64), is_grads_batched=True)
    torch.testing.assert_close(got.diagonal(), y.detach())


# ---------------------------------------------------------------------------------------------------- tangents

tangents = pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # torch's own make_dual


def tangent_of(f, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent


@tangents
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_tangents(requires_grad, grad_mode):
    x = numbers(4).detach().requires_grad_(requires_grad)
    fast = compiled(waves)
    with torch.set_grad_enabled(grad_mode):
        for _ in range(2):
            torch.testing.assert_close(fast(x), waves(x))
            torch.testing.assert_close(tangent_of(fast, x, torch.ones(4)), tangent_of(waves, x, torch.ones(4)))


@tangents
def test_tangents_of_parameters_and_of_writes():
    def f(x, scale):
        y = x * 1
        y.mul_(scale)
        return y + x.detach()

    x = numbers(3).detach()
    want, got = (tangent_of(lambda s, f=f: f(x, s), torch.ones(3), torch.full((3,), 2.0)) for f in (f, compiled(f)))
    torch.testing.assert_close(got, want)


@tangents
def test_gradients_of_tangents():
    x = numbers(3)
    want, got = (tangent_of(f, x, torch.ones(3)).sum() for f in (waves, compiled(waves)))
    torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))


@tangents
def test_tangents_of_jax_functions():
    x = numbers(3).detach()
    torch.testing.assert_close(tangent_of(lambda x: call_jax(jnp.sin, (x,)), x, torch.ones(3)), x.cos())
    torch.testing.assert_close(tangent_of(compiled(lambda x: call_jax(jnp.sin, (x,))), x, torch.ones(3)), x.cos())


# ---------------------------------------------------------------------------------------------------- copies


COPIES = {
    "clone": lambda memory: memory.clone(),
    "clone, then detached": lambda memory: memory.clone().detach(),
    "detached, then cloned": lambda memory: memory.detach().clone(),
    "of a view": lambda memory: memory[:].t().clone().t(),
    "torch.clone": lambda memory: torch.clone(memory),
    "contiguous": lambda memory: memory.t().contiguous().t(),
}


@pytest.mark.parametrize("remat", ["auto", "none", "full", jax.checkpoint_policies.dots_saveable])
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_stays_what_it_was(kind, remat):
    def f(q, memory):
        return q @ COPIES[kind](memory)

    want, got = [], []
    for call, out in ((f, want), (compiled(f, options={"remat": remat}), got)):
        q, memory = numbers(4, 4), numbers(4, 4, seed=5).detach()
        for _ in range(2):
            q.grad = None
            y = call(q, memory)
            memory.add_(1)
            y.sum().backward()
            out += [y.detach(), q.grad]
    torch.testing.assert_close(got, want)


def test_a_queue_of_keys_that_moves_on(device):
    """MoCo: the queue is written between the forward and the backward."""

    class Contrast(nn.Module):
        def __init__(self, width=512, length=1024):
            super().__init__()
            torch.manual_seed(0)
            self.encode = nn.Linear(width, width)
            self.register_buffer("queue", torch.randn(width, length) / width**0.5)

        def forward(self, x):
            return (self.encode(x) @ self.queue.clone().detach()).logsumexp(1).mean()

    ours, reference = Contrast().to(device), Contrast()
    fast = compiled(ours)
    for turn in range(2):
        for model, call in ((ours, fast), (reference, reference)):
            model.zero_grad()
            loss = call(numbers(8, 512, seed=turn).detach().to(model.queue.device))
            with torch.no_grad():
                model.queue[:, :8] = turn
            loss.backward()
        for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-6)


def test_a_write_without_a_copy_is_an_error_that_says_what_to_do():
    memory = torch.ones(3)
    y = compiled(lambda q, memory: q * memory)(numbers(3), memory)
    memory.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation(.|\n)*Hint: a `clone"):
        y.sum().backward()
