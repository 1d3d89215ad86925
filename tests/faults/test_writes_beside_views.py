"""An operator in place that is given its own memory more than once: tensors on one memory share a version counter."""

import pytest
import torch
from oracle import agree


def other_view(x):
    """What is read is another tensor than what is written, at the same place."""
    y = x * 2
    y.view(-1)[::7].add_(y.view(-1)[::7])
    y[::3].sub_(y[::3].detach(), alpha=0.5)
    return y


def whole(x):
    y = x * 2
    y.view(-1).sub_(y.reshape(-1), alpha=3)
    y[1:3] += y[1:3]
    return y


def beside(x):
    """Disjoint parts of one memory."""
    y = x * 2
    y[0].add_(y[1])
    y[1:3].copy_(y[3:5])
    y[2, 1:3] = y[2, 3:5]
    return y, y[0]


def result_given(x):
    y = x * 2
    y = y.detach()
    torch.add(y[0], y[1], out=y[2])
    torch.mul(y[2], y[2].view(-1), out=y[2])
    return y


def picked(x):
    y = x * 2
    y[0].index_add_(0, torch.tensor([0, 2]), y[1, :2])
    y[2].masked_scatter_(y[3] > 0, y[4])
    return y


@pytest.mark.parametrize("f", [other_view, whole, beside, result_given, picked])
@pytest.mark.parametrize("shape", [(6, 7), (256, 512)], ids=str)
def test_views_of_what_is_written(f, shape, device):
    grad = f not in (result_given, picked)  # eager has no gradient of these
    agree(
        f, lambda: (torch.linspace(-2, 2, shape[0] * shape[1]).reshape(shape).requires_grad_(grad),), device=device, grad=grad
    )


def test_arguments_of_one_memory(device):
    def f(p, q):
        p.add_(q)
        return p * 2

    def views():
        base = torch.arange(12.0)
        return base[::2], base[::2]

    if device.type == "cpu":  # strides do not say where a view of xla lies
        agree(f, views)


def through_expanded(x):
    y = x.expand(2, 3)
    y[0, 0] = 5
    return y, x + 1


def through_windows(x):
    y = x * 2
    z = y.unfold(0, 2, 1)
    z[0, 1] = 5
    return y, z


def through_expanded_rows(x):
    y = (x * 1).expand(2, 3)
    y[0] = x * 7
    return y


@pytest.mark.parametrize("f", [through_expanded, through_windows, through_expanded_rows])
def test_elements_that_a_view_shows_twice(f, caplog):
    """A write to one of them is a write to both: eager's to do, and the reason says so."""
    agree(f, lambda: (torch.arange(3.0),))
    assert "twice" in caplog.text


def test_an_argument_that_shows_elements_twice(caplog):
    def f(y):
        y[0, 0] = 5
        return y * 2

    agree(f, lambda: (torch.arange(3.0).expand(2, 3),))
    agree(f, lambda: (torch.arange(5.0).unfold(0, 2, 1),))
    assert "twice" in caplog.text
