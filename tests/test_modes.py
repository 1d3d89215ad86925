"""Grad modes: around the call, inside the function, and changing from call to call."""

import pytest
import torch
from oracle import agree, compiled
from torch import nn

import pure_backend


def leaf() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def no_grad_region(x):
    with torch.no_grad():
        y = x * 2
    return y + x, y


def no_grad_write(x):
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y * x, y


def no_grad_write_to_view(x):
    y = x * 2
    with torch.no_grad():
        y[1:].mul_(3)
    return y.sin()


def no_grad_write_then_recorded_write(x):
    y = x * 2
    with torch.no_grad():
        y.add_(5)
    y.mul_(x)
    return y


def no_grad_copy_from_input(x):
    y = torch.zeros(3, device=x.device)
    with torch.no_grad():
        y.copy_(x)
    return y * x, y


def view_made_under_no_grad(x):
    y = x * 2
    with torch.no_grad():
        v = y[1:]
    w = v * x[1:]
    return w, y


def enable_inside_no_grad(x):
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * a
        c = b * x
    return a, b, c, b + c


def set_grad_enabled_by_value(x):
    with torch.set_grad_enabled(False):
        a = x.sin()
    with torch.set_grad_enabled(True):
        b = x.cos()
    return a * b, a, b


def inference_region(x):
    with torch.inference_mode():
        y = x * 2
    return x + 1, y.shape


def decorated(x):
    @torch.no_grad()
    def frozen(t):
        return t.exp()

    return frozen(x) * x


def detach_both(x):
    d = x.detach()
    return d * x, d + 1


def detach_then_write(x):
    y = x * 2
    y.detach().mul_(3)
    return y * 1, y


def data_attribute(x):
    return x.data * 2 + x


REGIONS = [
    *(no_grad_region, no_grad_write, no_grad_write_to_view, no_grad_write_then_recorded_write, no_grad_copy_from_input),
    *(view_made_under_no_grad, enable_inside_no_grad, set_grad_enabled_by_value, inference_region, decorated),
    *(detach_both, detach_then_write, data_attribute),
]


@pytest.mark.parametrize("f", REGIONS, ids=lambda f: f.__name__)
def test_regions_inside_the_function(f, device):
    """Values, `requires_grad` and gradients with grad-mode regions inside."""
    agree(f, lambda: (leaf(),), device=device, grad=True)


def no_grad_update(p):
    with torch.no_grad():
        p.add_(1)
    return (p * p).sum()


def no_grad_update_by_view(p):
    with torch.no_grad():
        p[1:] -= 0.5 * p[:-1]
    return p.sin()


def no_grad_update_after_use(p):
    y = p * 3
    with torch.no_grad():
        p.zero_()
    return y + p


def update_through_detach(p):
    p.detach().mul_(2)
    return p * p


@pytest.mark.parametrize(
    "f",
    [no_grad_update, no_grad_update_by_view, no_grad_update_after_use, update_through_detach],
    ids=lambda f: f.__name__,
)
def test_leaf_written_under_no_grad(f, device):
    """A parameter updated in place inside the compiled function."""
    agree(f, lambda: (leaf(),), device=device, grad=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_around_the_call(mode, device):
    """The ambient mode decides whether the outputs require grad."""

    def f(x, y):
        return x * y, x.sum(), y + 1  # no view: torch_xla has none under inference_mode

    def run(call, x, y):
        with mode():
            return [(t.requires_grad, t.is_inference(), t.tolist()) for t in call(x, y)]

    want = run(f, leaf(), torch.ones(3))
    got = run(compiled(f), leaf().detach().to(device).requires_grad_(), torch.ones(3, device=device))
    assert got == want


def test_views_under_inference_mode():
    """Views of ordinary tensors and of inference tensors."""

    def views(x):
        return x[0], x.view(3, 1), x * 2

    seen = []
    for call in (views, compiled(views)):
        with torch.inference_mode():
            *_, y = outputs = call(leaf())
            outputs = (*outputs, *call(y))
        seen.append([(t.tolist(), t.requires_grad, t.is_inference()) for t in outputs])
    assert seen[0] == seen[1]


def test_inference_tensors_as_inputs():
    """Made under `inference_mode`, used outside of it."""
    with torch.inference_mode():
        x = torch.ones(3)
    y = compiled(lambda x: x * 2)(x)
    assert y.tolist() == [2, 2, 2]
    assert not y.requires_grad


def test_mode_changes_from_call_to_call(device):
    """no_grad, grad, inference, grad: each call obeys its own mode."""
    m = nn.Linear(3, 2).to(device)
    c = compiled(m)
    x = torch.ones(1, 3, device=device)
    for mode, wanted in ((torch.no_grad, False), (torch.enable_grad, True), (torch.inference_mode, False)) * 2:
        with mode():
            assert c(x).requires_grad is wanted
    c(x).sum().backward()
    assert (m.weight.grad == 1).all()
    assert pure_backend.statistics().traces <= 3


def test_requires_grad_toggled_between_calls(device):
    """Freezing and thawing a parameter."""
    m = nn.Linear(2, 2).to(device)
    c = compiled(m)
    x = torch.ones(1, 2, device=device)
    for wanted in (True, False, True, False):
        m.weight.requires_grad_(wanted)
        m.zero_grad()
        c(x).sum().backward()
        assert (m.weight.grad is not None) == wanted
        assert (m.bias.grad == 1).all()


def test_input_that_requires_grad_from_time_to_time(device):
    """The same function called with and without a differentiable input."""
    c = compiled(lambda x: x.sin() * 2)
    for wanted in (False, True, False, True):
        x = torch.ones(3).to(device).requires_grad_(wanted)
        y = c(x)
        assert y.requires_grad == wanted
        if wanted:
            y.sum().backward()
            torch.testing.assert_close(x.grad.cpu(), 2 * torch.ones(3).cos())


MASKS = [(True, False, True), (False, True, False), (False, False, True), (True, True, True)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_some_inputs_require_grad(mask, device):
    """Only the inputs that require grad get one; outputs require grad only where they depend on one."""

    def f(a, b, c):
        return a * b, b.sin(), c @ a, (a > b).float(), a.argmax()

    def make_args():
        return tuple(torch.full((3,), i + 0.5, requires_grad=m) for i, m in enumerate(mask))

    agree(f, make_args, device=device, grad=True, pure=True)


def product(x, w):
    return x @ w, (x @ w).float().softmax(-1), x + 1


def test_autocast_around_the_call(device):
    """Ambient autocast, on and off from call to call, and with either dtype."""
    c = compiled(product)
    args = torch.eye(3), torch.arange(9.0).reshape(3, 3)
    for enabled, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float16)):
        if device.type == "xla" and dtype == torch.float16:
            continue  # torch_xla's autocast knows bfloat16 only
        with torch.autocast("cpu", dtype, enabled=enabled):
            want = product(*args)
        with torch.autocast(device.type, dtype, enabled=enabled):
            got = c(*(t.to(device) for t in args))
        for w, g in zip(want, got, strict=True):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g.cpu(), w, rtol=2e-2, atol=2e-2)


def switch_off(x):
    y = x * 2
    torch.set_grad_enabled(False)
    return y, x * 3


def test_grad_mode_changed_for_good(device):
    """`set_grad_enabled` as a statement outlives the call."""
    seen = []
    for call, where in ((switch_off, "cpu"), (compiled(switch_off), device)):
        x = leaf().detach().to(where).requires_grad_()
        outputs = call(x)
        seen.append(([t.requires_grad for t in outputs], torch.is_grad_enabled()))
        torch.set_grad_enabled(True)
    assert seen[0] == seen[1] == ([True, False], False)
