"""Gradients: absent where eager has none, accumulated, of every order."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, both_raise, compiled
from torch import nn


def vector(*values) -> torch.Tensor:
    return torch.tensor(values or (0.5, -1.0, 2.0), requires_grad=True)


def unused(x, y):
    return x * 2


def unused_by_shape(x, y):
    return x * y.shape[0]


def used_for_indices_only(x, y):
    return x[y.argsort()]


def used_for_comparison_only(x, y):
    return torch.where(y > 0, x, -x)


def detached(x, y):
    return x * y.detach()


def two_paths(x, y):
    return x * y + x.sin(), x


def returned_untouched(x, y):
    return x, y * 2


def like(x, y):
    return torch.zeros_like(y) + x + torch.ones_like(y)


def rounded(x, y):
    return x.round() * y + y.floor()


def integer_detour(x, y):
    return x * y.long()


ABSENT = [
    *(
        unused,
        unused_by_shape,
        used_for_indices_only,
        used_for_comparison_only,
        detached,
        two_paths,
        returned_untouched,
    ),
    *(like, rounded, integer_detour),
]


@pytest.mark.parametrize("f", ABSENT, ids=lambda f: f.__name__)
def test_none_where_eager_has_none(f, device):
    """Inputs that are not on a differentiable path have no gradient, rather than zeros."""
    agree(f, lambda: (vector(), vector(1.5, -0.5, 3.0)), device=device, grad=True)


def split_heads(x, y):
    return x.sin(), y.cos(), x * y


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1)], ids=str)
def test_backward_from_some_outputs(used, device):
    """Outputs that take no part in the backward contribute nothing, not even zeros."""
    grads = []
    for call, where in ((split_heads, "cpu"), (compiled(split_heads), device)):
        x, y = (t.detach().to(where).requires_grad_() for t in (vector(), vector(1.0, 2.0, 3.0)))
        outputs = call(x, y)
        sum(outputs[i].sum() for i in used).backward()
        grads.append([None if t.grad is None else t.grad.cpu() for t in (x, y)])
    for want, got in zip(*grads, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want)


KINKS = {
    "abs": lambda x: x.abs(),
    "relu": lambda x: x.relu(),
    "relu6": lambda x: F.relu6(x * 6),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardtanh": lambda x: F.hardtanh(x),
    "clamp": lambda x: x.clamp(0, 1),
    "clamp to tensors": lambda x: x.clamp(torch.zeros_like(x), torch.ones_like(x)),
    "elu, selu, softplus": lambda x: (F.elu(x), F.selu(x), F.softplus(x), F.hardswish(x), F.hardsigmoid(x)),
    "sign, floor": lambda x: x.sign() * x + x.floor() * x + x.frac(),
    "norm of zero": lambda x: (x[:2].norm(), x[:2].norm(dim=0), torch.linalg.vector_norm(x[:2])),
    "norms": lambda x: (x.norm(1), x.norm(float("inf")), x.norm(3), x.norm(0.5)),
    "std of equals": lambda x: (x[:2].std(), x[3:].std(0), x[:2].var()),
    "sqrt of zero": lambda x: x.abs().sqrt(),
    "powers of zero": lambda x: (x**0, x**1, x**2, x**3.0, x**0.0),
    "power of tensors": lambda x: (x.abs() ** x.abs(), torch.pow(2.0, x), torch.pow(0.0, x.abs())),
    "products with zeros": lambda x: (x.prod(), x[1:].prod(), x.cumprod(0)),
    "maximum of equals": lambda x: (
        torch.maximum(x, x.detach()),
        torch.minimum(x, torch.zeros_like(x)),
        torch.fmax(x, x * 1),
    ),
    "amax of equals": lambda x: (x.amax(), x.amin(0), x.max(), x.min()),
    "max along a dimension": lambda x: (x.max(0).values, x.min(0).values, x.sort(stable=True).values),
    "median": lambda x: (x.median(), x[1:4].median(0).values, x[1:4].kthvalue(1).values),
    "logsumexp of -inf": lambda x: torch.stack([x, x.masked_fill(x == 0, -torch.inf)]).logsumexp(0),
    "softmax with -inf": lambda x: x.masked_fill(x == 1, -torch.inf).softmax(0),
    "where hides nan": lambda x: torch.where(x > 0, x.sqrt(), torch.zeros_like(x)),
    "xlogy": lambda x: (torch.xlogy(x, x.detach() + 1), torch.special.entr(x.abs() + 1)),
    "atan2, hypot": lambda x: (torch.atan2(x, x + 1), torch.hypot(x, x + 1)),
    "huber": lambda x: (F.huber_loss(x, x.detach() * 2), F.smooth_l1_loss(x, x.detach() + 1), F.l1_loss(x, x.detach())),
    "remainder": lambda x: (x % 0.7, torch.fmod(x, 0.7)),
    "renorm": lambda x: (F.normalize(x[:2], dim=0), F.cosine_similarity(x, x + 1, dim=0)),
    "cdist of equals": lambda x: torch.cdist(x[:, None], x[:, None].detach()),
    "pairwise": lambda x: F.pairwise_distance(x[None], x[None].detach() + 1),
}


@pytest.mark.parametrize("name", KINKS)
def test_gradient_at_kinks_and_ties(name):
    """Where the derivative is a convention, it is torch's, not JAX's."""
    agree(KINKS[name], lambda: (vector(0.0, 0.0, -1.0, 1.0, 1.0),), grad=True)


def test_no_input_requires_grad(device):
    """Then no output does."""
    got = agree(split_heads, lambda: (torch.ones(3), torch.ones(3)), device=device, pure=True)
    assert not any(x.requires_grad for x in got.outputs)


def test_accumulation_over_calls(device):
    """Gradients of several backward passes add up."""
    x = vector().detach().to(device).requires_grad_()
    c = compiled(lambda x: (x * x).sum())
    for _ in range(3):
        c(x).backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_retain_graph(device):
    """A graph may be gone through twice if it was retained, and only then."""
    x = vector().detach().to(device).requires_grad_()
    y = compiled(lambda x: (x.exp() * x).sum())(x)
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_write_to_a_saved_tensor_raises_in_backward():
    """As in eager: what backward needs was changed in between."""

    def f(x):
        return (x * x).sum()

    for call in (f, compiled(f)):
        h = vector() * 1
        y = call(h)
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_write_to_an_output_before_backward(device):
    """Outputs may be written to by the caller."""
    grads = []

    def f(x):
        return x * 3

    for call, where in ((f, "cpu"), (compiled(f), device)):
        x = vector().detach().to(where).requires_grad_()
        y = call(x)
        y.add_(1)
        y[0] = 0
        (y * y).sum().backward()
        grads.append(x.grad.cpu())
    torch.testing.assert_close(*grads)


def test_non_leaf_argument_written_in_place(device):
    """The write of a compiled function to a tensor with history is part of that history."""
    results = []

    def f(h, w):
        h.mul_(w)
        return h.sum()

    for call, where in ((f, "cpu"), (compiled(f), device)):
        x, w = (t.detach().to(where).requires_grad_() for t in (vector(), vector(2.0, 3.0, 4.0)))
        h = x.sin()
        (call(h, w) + (h * h).sum()).backward()
        results.append([t.cpu() for t in (h.detach(), x.grad, w.grad)])
    torch.testing.assert_close(*results)


def test_view_argument_with_history_written_in_place():
    """The same through a view of a tensor with history: its base sees the write."""
    results = []

    def f(v, w):
        v.mul_(w)

    for call in (f, compiled(f)):
        x, w = vector(), vector(2.0, 3.0)
        h = x.sin()
        call(h[1:], w)
        (h * h).sum().backward()
        results.append([h.detach(), x.grad, w.grad])
    torch.testing.assert_close(*results)


def test_chain_of_compiled_functions(device):
    """The output of one compiled function is the input of another."""
    f, g = (lambda x: x.sin() * 2), (lambda y: (y * y, y.exp()))
    grads = []
    for a, b, where in ((f, g, "cpu"), (compiled(f), compiled(g), device)):
        x = vector().detach().to(where).requires_grad_()
        u, v = b(a(x))
        (u + v).sum().backward()
        grads.append(x.grad.cpu())
    torch.testing.assert_close(*grads)


def test_hooks_on_tensors_around_the_call(device):
    """Hooks of inputs and outputs run, and may change the gradient."""
    grads = []

    def f(x):
        return x * 3

    for call, where in ((f, "cpu"), (compiled(f), device)):
        x = vector().detach().to(where).requires_grad_()
        x.register_hook(lambda g: g * 10)
        y = call(x)
        y.register_hook(lambda g: g + 1)
        y.sum().backward()
        grads.append(x.grad.cpu())
    assert grads[0].tolist() == [60, 60, 60]
    torch.testing.assert_close(*grads)


def derivatives(f, x, order) -> list[torch.Tensor]:
    """All derivatives of `f` along ones up to `order`, each through the graph of the one before."""
    y, found = f(x).sum(), []
    for _ in range(order):
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(grad)
        y = (grad * grad).sum()
    return found


SMOOTH = {
    "exp sin": lambda x: x.exp() * x.sin(),
    "cubic": lambda x: x**3 - 2 * x,
    "softmax": lambda x: x.softmax(0) * x,
    "tanh of matmul": lambda x: torch.tanh(torch.outer(x, x) @ x),
    "layer norm": lambda x: F.layer_norm(x, (3,)) * x,
    "gelu": lambda x: F.gelu(x) * x,
    "norm": lambda x: x.norm() * x,
    "through a write": lambda x: write_cube(x),
    "no_grad inside": lambda x: frozen_factor(x),
    "cumprod": lambda x: x.cumprod(0),
}


def write_cube(x):
    y = x * x
    y[1:] *= x[1:]
    return y


def frozen_factor(x):
    with torch.no_grad():
        scale = x.sin()
    return scale * x**3


def layer_norm_by_hand(x):
    centred = x - x.mean()
    return centred / torch.sqrt((centred * centred).mean() + 1e-5) * x


# The third derivative of torch's own layer_norm is off by 1e-3 even in f64: its double backward takes rstd as constant.
EXACT = {"layer norm": layer_norm_by_hand}


@pytest.mark.parametrize("name", SMOOTH)
def test_third_order(name, device):
    """`create_graph=True`, three times over; in f64, since eager's own third derivatives are noise in f32."""
    f, x = SMOOTH[name], vector().detach().double()
    want = derivatives(EXACT.get(name, f), x.clone().requires_grad_(), 3)
    got = derivatives(compiled(f), x.to(device).requires_grad_(), 3)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-4, atol=1e-4)


def test_hessian_by_rows(device):
    """The whole Hessian, and a gradient that is not needed any more stays `None`."""

    def f(x, w):
        return (w * x**3).sum() + x.prod()

    results = []
    for call, where in ((f, "cpu"), (compiled(f), device)):
        x, w = (t.detach().to(where).requires_grad_() for t in (vector(), vector(1.0, 2.0, 3.0)))
        gx, gw = torch.autograd.grad(call(x, w), (x, w), create_graph=True)
        rows = [torch.autograd.grad(g, x, retain_graph=True)[0] for g in gx]
        cross = torch.autograd.grad(gw.sum(), x)[0]
        results.append([t.cpu() for t in (*rows, cross)])
    torch.testing.assert_close(*results)


def test_gradient_penalty_reaches_the_parameters(device):
    """The penalty on the input gradient is differentiated in the parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    twin.load_state_dict(net.state_dict())
    for call, where in ((net, "cpu"), (compiled(twin), device)):
        x = torch.linspace(-1, 1, 6).reshape(2, 3).to(where).requires_grad_()
        out = call(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (grad.norm(dim=1) - 1).square().mean()).backward()
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_gradient_of_a_detached_output_raises(device):
    """Nothing to differentiate: as in eager."""
    both_raise(lambda x: compiled(lambda t: t.detach() * 2)(x).sum().backward() or x, lambda: (vector(),), device=device)


def test_integer_inputs_beside_differentiable_ones(device):
    """Integer, bool and complex inputs beside a differentiable float."""

    def f(x, i, m, z):
        return x[i] * m, (x.to(z.dtype) * z), i + 1, ~m, z.conj()

    def make_args():
        return (
            vector(),
            torch.tensor([2, 0, 1]),
            torch.tensor([True, False, True]),
            torch.tensor([1 + 1j, 2j, 3.0]),
        )

    agree(f, make_args, device=device, grad=True)


def write_to_view_of_leaf(x):
    x[1:].mul_(2)
    return x.sum()


def write_to_leaf(x):
    x.mul_(2)
    return x.sum()


@pytest.mark.parametrize("f", [write_to_leaf, write_to_view_of_leaf], ids=lambda f: f.__name__)
def test_write_to_a_leaf_raises(f, device):
    """Eager forbids in-place writes to a leaf that requires grad, and to views of one."""
    both_raise(f, lambda: (vector(),), device=device)


def offload(t):
    return t.detach().cpu().clone(), t.device


def reload(packed):
    tensor, where = packed
    return tensor.to(where)


CONTEXTS = {
    "saved_tensors_hooks": (lambda: torch.autograd.graph.saved_tensors_hooks(offload, reload), contextlib.nullcontext),
    "backward under no_grad": (contextlib.nullcontext, torch.no_grad),
    "backward under enable_grad": (contextlib.nullcontext, torch.enable_grad),
    "backward under autocast": (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)),
    "forward under autocast": (lambda: torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext),
    "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), contextlib.nullcontext),
    "no multithreading": (contextlib.nullcontext, lambda: torch.autograd.set_multithreading_enabled(False)),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_around_forward_and_backward(name):
    """What surrounds the call, or its backward, acts as it does on eager."""
    around_forward, around_backward = CONTEXTS[name]
    f = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    results = []
    for call in (f, compiled(f)):
        f.zero_grad()
        x = vector()
        with around_forward():
            y = call(x[None])
        loss = (y * torch.tensor([1.0, -2.0])).sum()
        with around_backward():
            loss.backward()
        results.append([y.detach(), x.grad, *(p.grad for p in f.parameters())])
    torch.testing.assert_close(*results, rtol=2e-2 if "autocast" in name else 1e-5, atol=1e-3)


def test_saved_on_cpu():
    """`save_on_cpu` around the forward."""
    x = vector()
    with torch.autograd.graph.save_on_cpu():
        y = compiled(lambda x: x.sin() * x.exp())(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() * x.exp() + x.sin() * x.exp()).detach())
