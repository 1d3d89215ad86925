"""What operators change of a tensor in place besides its values: its shape, and its gradient history."""

import pytest
import torch
from oracle import agree, compiled
from torch import nn

ONE_PROGRAM = {"options": {"on_impure": "error"}}


def reshaped(change):
    def f(x):
        y = x + 1
        z = y * 2
        change(y)
        return y * 3, z, y

    return f


RESHAPED = {
    "t_": lambda y: y.t_(),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "squeeze_": lambda y: y.unsqueeze_(1).squeeze_(),
    "transpose_": lambda y: y.transpose_(0, 1),
    "swapaxes_": lambda y: y.swapaxes_(0, 1),
    "swapdims_": lambda y: y.swapdims_(0, 1),
    "as_strided_": lambda y: y.as_strided_((3, 2), (1, 3)),
    "part": lambda y: y.as_strided_((2,), (1,), 2),
    "twice": lambda y: y.t_().unsqueeze_(0).mul_(2),
    "written through another name": lambda y: y.mul_(2).t_().add_(y.new_ones(2)),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_the_shape(name, device):
    agree(reshaped(RESHAPED[name]), lambda: (torch.arange(6.0).reshape(2, 3),), device=device, **ONE_PROGRAM)


@pytest.mark.parametrize("name", RESHAPED)
def test_the_shape_with_gradients(name):
    agree(reshaped(RESHAPED[name]), lambda: (torch.arange(6.0).reshape(2, 3).requires_grad_(),), grad=True, **ONE_PROGRAM)


def a_view_before(x):
    y = x + 1
    v = y.view(-1)
    y.t_()
    v.mul_(2)
    return y * 1, v * 1


def a_view_of_the_input(x):
    y = x.view(3, 2)
    y.t_()
    return y, y * 2


def a_view_after(x):
    y = x * 2
    y.t_()
    return y, y[0]


@pytest.mark.usefixtures("as_users_see_it")
@pytest.mark.parametrize(
    "f",
    [
        lambda a: (a + 1).unsqueeze_(0),
        a_view_before,
        a_view_of_the_input,
        a_view_after,
        lambda x: (x * 1).view(-1).unsqueeze_(0).expand(2, 6) + 1,
    ],
)
def test_views_of_what_changed(f):
    agree(f, lambda: (torch.arange(6.0).reshape(2, 3),))


def test_the_shape_of_an_input():
    """Seen by the caller, so the node runs in eager."""
    x = torch.arange(6.0).reshape(2, 3)
    out = compiled(lambda x: (x.t_() * 2).sin().cos() + 1)(x)
    assert x.shape == (3, 2) and out.shape == (3, 2)


def cut(x):
    y = x * 2
    y.detach_()
    return (y * x).sum()


def cut_then_written(x):
    y = x * 2
    y.detach_()
    y.mul_(x)
    return y * x


def written_then_cut(x):
    y = x * 2
    z = y + x  # what saves y would raise in eager
    y.mul_(3).detach_().add_(1)
    return y * x, z, y


def views_after(x):
    y = (x * 2).clone()
    y.detach_()
    v = y[1:]
    v.mul_(x[1:])
    return y * x, v


def view_before(x):
    y = x * 2
    v = y.view(-1)
    y.detach_()
    return y * x, v * x


def some_of_two(x):
    y, z = x * 2, x * 3
    y.detach_()
    return y * z, y


def truncated(x):
    h, out = torch.zeros_like(x), []
    for step in range(6):
        h = torch.tanh(h * 0.5 + x * step) + 1  # what saves h would raise in eager
        out.append(h + x)
        if step % 3 == 2:
            h.detach_()
    return torch.stack(out)


CUT = [cut, cut_then_written, written_then_cut, views_after, some_of_two, truncated]


@pytest.mark.parametrize("f", CUT)
def test_the_history(f, device):
    agree(f, lambda: (torch.tensor([1.0, 2.0, 3.0], requires_grad=True),), device=device, grad=True, **ONE_PROGRAM)


@pytest.mark.parametrize("repeats", ["auto", "scan"])
def test_a_truncated_recurrence_of_layers(repeats):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, xs):
            h, out = xs.new_zeros(2, 4), []
            for x in xs:
                h = self.cell(x, h)
                out.append(h)
                h = h.clone()
                h.detach_()
            return torch.stack(out)

    agree(Recurrent(), lambda: (torch.ones(5, 2, 3),), grad=True, options={"repeats": repeats, "on_impure": "error"})


def test_a_view_that_keeps_its_history():
    """Views made before `detach_` keep theirs: left to eager."""
    agree(view_before, lambda: (torch.tensor([1.0, 2.0, 3.0], requires_grad=True),), grad=True)


def test_the_history_of_an_input():
    """A hidden state that the caller hands in: it is the caller's tensor that is detached."""

    def step(h, w):
        h.detach_()
        return torch.tanh(h * w).mul(2).sin()

    for f in (step, compiled(step)):
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        h = w * 2
        f(h, w).sum().backward()
        assert not h.requires_grad
        want = w.grad if f is step else want  # noqa: F821
        torch.testing.assert_close(w.grad, want)


def test_detaching_a_view_is_eagers_error():
    def f(x):
        y = (x * 2)[1:]
        y.detach_()
        return y * 3

    with pytest.raises(RuntimeError, match="Can't detach views in-place"):
        compiled(f)(torch.ones(3, requires_grad=True))
