"""Loops against the Python loops that they stand for: values, gradients, writes, randomness, and the errors of bad bodies."""

import copy

import pytest
import torch
from torch import nn

import pure_backend
from pure_backend import fori_loop, scan, scan_layers, while_loop


def loop(fn, init, xs, reverse=False):
    """`scan` in Python."""
    carry, ys = init, []
    for x in reversed(xs) if reverse else xs:
        carry, y = fn(carry, x)
        ys.append(y)
    return carry, torch.stack(ys[::-1] if reverse else ys)


def numbers(*shape, device="cpu", grad=False):
    torch.manual_seed(4)
    return torch.randn(*shape).to(device).requires_grad_(grad)


# ---------------------------------------------------------------------------------------------------------------- scan


def test_the_guides_cumulative_sum(device):
    carry, ys = scan(lambda c, x: (c + x, c + x), torch.tensor(0.0, device=device), torch.tensor([1.0, 2, 3], device=device))
    assert carry.item() == 6 and ys.tolist() == [1, 3, 6]


def test_the_guides_running_mean(device):
    def mean(carry, x):
        carry = {"sum": carry["sum"] + x["value"], "count": carry["count"] + 1}
        return carry, carry["sum"] / carry["count"]

    init = {"sum": torch.tensor(0.0, device=device), "count": torch.tensor(0, device=device)}
    carry, ys = scan(mean, init, {"value": torch.arange(1.0, 6, device=device)})
    assert ys.tolist() == [1, 1.5, 2, 2.5, 3]
    assert carry["count"].item() == 5 and carry["count"].dtype is torch.int64


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_of_all_that_is_read(reverse, unroll, checkpoint, device):
    w, linear = numbers(3, 3, device=device, grad=True), nn.Linear(3, 3).to(device)

    def body(c, x):
        c = (linear(c) @ w + x).tanh()
        return c, c * x

    inputs = [numbers(3, device=device, grad=True), numbers(6, 3, device=device, grad=True)]
    leaves = [*inputs, w, *linear.parameters()]
    got = scan(body, *inputs, reverse=reverse, unroll=unroll, checkpoint=checkpoint)
    want = loop(body, *inputs, reverse=reverse)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(c.sum() + ys.square().sum(), leaves) for c, ys in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_f10_an_integer_in_the_carry(device):
    """F10 https://github.com/jax-ml/jax/issues/22045"""
    x = torch.ones(4, device=device, requires_grad=True)
    init = (torch.tensor(0, device=device), torch.tensor(0.0, device=device))
    (i, s), ys = scan(lambda c, x: ((c[0] + 1, c[1] + x * c[0]), c[0]), init, x)
    s.backward()
    assert s.item() == 6 and x.grad.tolist() == [0, 1, 2, 3]
    assert i.item() == 4 and ys.tolist() == [0, 1, 2, 3] and ys.dtype is torch.int64


def test_writes_inside_the_body(device):
    def body(c, x):
        c.add_(x)
        y = c * 2
        c[0] = 7
        return c, y

    init = torch.zeros(3, device=device)
    carry, ys = scan(body, init, torch.ones(3, 3, device=device))
    assert carry.tolist() == [7, 3, 3] and ys[:, 0].tolist() == [2, 16, 16] and ys[:, 1].tolist() == [2, 4, 6]
    assert init.tolist() == [0, 0, 0]


def test_f03_a_write_to_what_is_outside():
    """F03 https://github.com/pytorch/xla/pull/7901: refused, never dropped."""
    outside = torch.zeros(1)

    def body(c, x):
        outside.add_(x)
        return c + x, c

    with pytest.raises(Exception, match="mutation"):
        scan(body, torch.ones(1), torch.arange(3.0).reshape(3, 1))
    assert outside.item() == 0


def test_other_random_numbers_at_each_step(device):
    _, ys = scan(
        lambda c, x: (c, torch.rand(2, device=x.device) + x), torch.zeros(1, device=device), torch.zeros(5, 2, device=device)
    )
    assert len({tuple(row) for row in ys.tolist()}) == 5


def test_without_xs(device):
    carry, ys = scan(lambda c, _: (c * 2, c), torch.tensor(1.0, device=device), None, length=4)
    assert carry.item() == 16 and ys.tolist() == [1, 2, 4, 8]


def test_the_body_is_traced_once(device):
    x = torch.ones(5, device=device)
    for _ in range(4):
        scan(lambda c, v: (c + v, c), torch.tensor(0.0, device=device), x)
    assert pure_backend.statistics().traces == 1


def test_inside_a_compiled_function(device):
    f = torch.compile(lambda x: scan(lambda c, v: (c + v, c), x[0] * 0, x)[0] * 2, backend="assume_pure", fullgraph=True)
    assert f(torch.ones(4, device=device)).item() == 8
    assert pure_backend.statistics().traces == 1


def test_bad_scans():
    x = torch.ones(3, 1)
    with pytest.raises(TypeError, match=r"scan: carry 0 was f32\[1\] and came back as f64\[1\]"):
        scan(lambda c, v: ((c + v).double(), c), torch.zeros(1), x)
    with pytest.raises(TypeError, match="structure"):
        scan(lambda c, v: ((c, c), c), torch.zeros(1), x)
    with pytest.raises(ValueError, match=r"number of steps, got \[3, 2\]"):
        scan(lambda c, v: (c, c), torch.zeros(1), (x, torch.ones(2)))
    with pytest.raises(ValueError, match="number of steps"):
        scan(lambda c, v: (c, c), torch.zeros(1), None)
    with pytest.raises(ValueError, match="no steps"):
        scan(lambda c, v: (c, c), torch.zeros(1), torch.ones(0, 2))
    with pytest.raises(ValueError, match="unroll"):
        scan(lambda c, v: (c, c), torch.zeros(1), x, unroll=0)


# --------------------------------------------------------------------------------------------------------------- while


def test_the_guides_while_loop(device):
    """Counting 10 down to 0 turns 3 into 13."""
    n, x = while_loop(
        lambda n, x: n > 0, lambda n, x: (n - 1, x + 1), (torch.tensor(10, device=device), torch.tensor(3, device=device))
    )
    assert (n.item(), x.item()) == (0, 13)


def test_f01_captures(device):
    """F01 https://github.com/pytorch/xla/issues/7839"""
    outside, linear = torch.tensor([2.0], device=device), nn.Linear(1, 1).to(device)

    def body(i, x):
        return i + 1, linear(x) * outside + torch.ones(1, device=x.device)

    x = want = torch.tensor([1.0], device=device)
    with torch.no_grad():
        _, got = while_loop(lambda i, x: i < 3, body, (torch.tensor(0, device=device), x))
        for i in range(3):
            _, want = body(i, want)
    torch.testing.assert_close(got, want)


def test_zero_turns(device):
    _, x = while_loop(
        lambda n, x: n > 0, lambda n, x: (n - 1, x * 2), (torch.tensor(0, device=device), torch.ones(2, device=device))
    )
    assert x.tolist() == [1, 1]


def test_bad_while_loops():
    with pytest.raises(TypeError, match=r"while_loop: carry 1 was f32\[2\] and came back as f32\[1\]"):
        while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x[:1]), (torch.tensor(3), torch.ones(2)))
    with pytest.raises(RuntimeError, match="while_loop has no gradient"):
        while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x * 2), (torch.tensor(3), torch.ones(2, requires_grad=True)))


# ---------------------------------------------------------------------------------------------------------------- fori


def test_static_bounds_have_gradients(device):
    w = numbers(3, 3, device=device, grad=True)
    got = fori_loop(1, 4, lambda i, v: v @ w + i, torch.ones(3, device=device))
    want = torch.ones(3, device=device)
    for i in range(1, 4):
        want = want @ w + i
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), w)[0] for v in (got, want)), rtol=1e-3, atol=1e-3)


def test_bounds_that_are_tensors(device):
    for low, high in ((0, 5), (5, 5), (7, 5)):
        bounds = (torch.tensor(low, device=device), torch.tensor(high, device=device))
        assert fori_loop(*bounds, lambda i, v: v + i, torch.tensor(0, device=device)).item() == sum(range(low, high))
    assert fori_loop(5, 2, lambda i, v: v + i, torch.tensor(3, device=device)).item() == 3


# -------------------------------------------------------------------------------------------------------------- layers


class Layer(nn.Module):
    """A layer with buffers, an extra input, and a tuple that goes on."""

    def __init__(self, eps=1e-5):
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(4, eps=eps)

    def forward(self, x, mask):
        return x + self.norm(self.outer(self.inner(x).relu()) * mask)


def settle(device):
    """Run what is lazy in one go: fetched one by one, each tensor would be a compilation of its own."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def both(layers, x, mask, **options):
    """Outputs of the loop and of Python's on CPU, with gradients; buffers of both are compared."""
    twins, other = copy.deepcopy(layers).cpu(), x.detach().cpu().clone().requires_grad_()
    got, want = scan_layers(layers, x, mask, **options), other
    for twin in twins:
        want = twin(want, mask.cpu())
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    got.square().sum().backward()
    want.square().sum().backward()
    settle(x.device)
    torch.testing.assert_close(x.grad.cpu(), other.grad, rtol=1e-3, atol=1e-3)
    for (name, a), b in zip(layers.named_parameters(), twins.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-3, msg=name)
    for (name, a), b in zip(layers.named_buffers(), twins.buffers(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_as_a_loop(checkpoint, device):
    layers = nn.ModuleList(Layer() for _ in range(3)).to(device)
    both(layers, numbers(5, 4, device=device, grad=True), torch.ones(5, 4, device=device), checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("repeats", ["auto", "scan"])
def test_layers_inside_a_compiled_function(repeats, checkpoint, device):
    """One graph, equal to the loop outside of it, with gradients and running statistics."""
    layers = nn.ModuleList(Layer() for _ in range(4)).to(device)
    twins, mask = copy.deepcopy(layers), torch.ones(5, 4, device=device)

    @torch.compile(backend="assume_pure", fullgraph=True, options={"repeats": repeats})
    def inside(x):
        return scan_layers(layers, x * 2, mask, checkpoint=checkpoint) + 1

    x, y = (numbers(5, 4, device=device, grad=True) for _ in range(2))
    got, want = inside(x), scan_layers(twins, y * 2, mask, checkpoint=checkpoint) + 1
    for loss in (got, want):
        loss.square().sum().backward()
    settle(device)
    tensors = [(got, want), (x.grad, y.grad)]
    tensors += [(a.grad, b.grad) for a, b in zip(layers.parameters(), twins.parameters(), strict=True)]
    tensors += zip(layers.buffers(), twins.buffers(), strict=True)
    for a, b in tensors:
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-3, atol=1e-4)


def test_depth_costs_no_tracing(device):
    lowered = []
    for depth in (2, 6):
        torch._dynamo.reset()
        pure_backend.reset_statistics()
        layers = nn.ModuleList(Layer() for _ in range(depth)).to(device)
        scan_layers(layers, numbers(5, 4, device=device, grad=True), torch.ones(5, 4, device=device)).sum().backward()
        lowered.append((pure_backend.statistics().traces, pure_backend.statistics().lowerings))
    assert lowered == [(1, 2)] * 2


def test_tuples_go_from_layer_to_layer(device):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(1))

        def forward(self, x, y):
            return y * self.scale, x + 1

    layers = nn.ModuleList(Two() for _ in range(3)).to(device)
    got = want = (torch.ones(2, device=device), torch.zeros(2, device=device))
    got = scan_layers(layers, got)
    for layer in layers:
        want = layer(*want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_an_optimizer_trains_the_layers(device):
    layers = nn.ModuleList(Layer() for _ in range(3)).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (scan_layers(layers, numbers(5, 4, device=device), torch.ones(5, 4, device=device)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert pure_backend.statistics().traces == 1


@pytest.mark.parametrize("checkpoint", [False, True])
def test_c03_other_masks_in_each_layer(checkpoint, device):
    """C03 https://github.com/pytorch/xla/pull/7901: the loop's body is one program, its random numbers are not."""
    layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(4))
    x = torch.ones(4096, device=device, requires_grad=True)
    torch.manual_seed(3)
    y = scan_layers(layers, x, checkpoint=checkpoint)
    y.sum().backward()
    assert set(y.tolist()) == {0, 16}
    assert (y != 0).float().mean().item() == pytest.approx(1 / 16, abs=0.02)
    torch.testing.assert_close(x.grad, y.detach())  # the gradient has the same masks
    torch.manual_seed(3)
    assert torch.equal(scan_layers(layers, x, checkpoint=checkpoint), y)


def test_unequal_layers():
    x, mask = torch.ones(5, 4), torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"layers 0 and 1 differ in norm\.eps: 1e-05 and 0\.1"):
        scan_layers([Layer(), Layer(eps=0.1)], x, mask)
    with pytest.raises(ValueError, match="layers 0 and 2 differ in class"):
        scan_layers([nn.Linear(4, 4), nn.Linear(4, 4), Layer()], x)
