"""Group G of the cases: caches, retracing, recompiles, memory."""

import gc
import weakref

import pytest
import torch
from oracle import agree, compiled
from torch import nn

import pure_backend


def counted(call, *args):
    """The result of a call, with the traces and lowerings that it cost."""
    before = pure_backend.statistics()
    result = call(*args)
    after = pure_backend.statistics()
    return result, (after.traces - before.traces, after.lowerings - before.lowerings)


def test_g01_two_shapes_two_programs(device):
    """G01 https://github.com/tenstorrent/tt-xla/pull/5771"""

    def f(x):
        return x.cumsum(1) * x.shape[1]

    c = compiled(f, dynamic=True)
    for x in (torch.ones(2, 7), torch.ones(2, 3), torch.ones(2, 7).double(), torch.ones(2, 7).t()):
        y = c(x.to(device))
        assert y.dtype == x.dtype
        torch.testing.assert_close(y.cpu(), f(x))


def test_g01_return_to_an_old_shape_is_a_hit(device):
    """G01 https://github.com/tenstorrent/tt-xla/pull/5771"""
    c = compiled(lambda x: x.cumsum(1) * x.shape[1], dynamic=True)
    for n, cost in ((7, (1, 1)), (3, (1, 1)), (7, (0, 0)), (3, (0, 0))):
        y, seen = counted(c, torch.ones(2, n, device=device))
        assert seen == cost, f"length {n}"
        assert y[0].tolist() == [n * (i + 1) for i in range(n)]


def use_and_drop(device) -> weakref.ref:
    m = nn.Linear(4, 4).to(device)
    c = compiled(m)
    c(torch.ones(1, 4, device=device)).sum().backward()
    return weakref.ref(m)


@pytest.mark.parametrize("every", [10, 200])
def test_g02_dead_models_are_collected(every, device):
    """G02 https://github.com/jax-ml/jax/issues/1710 (adapted to torch.compile)"""
    refs = []
    for i in range(200):
        if i % every == 0:
            torch._dynamo.reset()  # or Dynamo itself would serve all from its first compilation
        refs.append(use_and_drop(device))
    torch._dynamo.reset()
    gc.collect()
    assert sum(r() is not None for r in refs) <= 2


def test_g02_equal_graphs_share_one_entry(device):
    """G02 https://github.com/pytorch/xla/pull/8878 (three functions, three graphs, one program)"""
    w = torch.ones(3, 4).to(device).requires_grad_()
    calls = [compiled(eval("lambda x, w: (x @ w).tanh()")) for _ in range(3)]
    for c in calls:
        c(torch.ones(2, 3, device=device), w).sum().backward()
    assert pure_backend.statistics().traces == 1
    assert pure_backend.statistics().lowerings == 2
    assert pure_backend.statistics().cache_hits == 2


def test_g02_reused_ids_do_not_mix_programs(device):
    """G02 https://github.com/jax-ml/jax/issues/5210 (a new function often gets the id of a collected one)"""
    x = torch.ones(3, device=device)
    for i in range(4):
        torch._dynamo.reset()
        source = f"lambda x: x * {i} + {i % 3}"
        assert compiled(eval(source))(x).tolist() == [i + i % 3] * 3
        gc.collect()


@pytest.fixture
def global_state():
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)


@pytest.mark.filterwarnings("ignore:Please use the new API settings")
def test_g03_matmul_precision_is_in_the_key(device, global_state):
    """G03 https://github.com/pytorch/xla/pull/8981"""
    c = compiled(lambda a: a @ a)
    x = torch.ones(4, 4, device=device)
    for precision, lowerings in (("highest", 1), ("medium", 1), ("highest", 0), ("medium", 0)):
        torch.set_float32_matmul_precision(precision)
        y, (_, seen) = counted(c, x)
        assert seen == lowerings, precision
        assert (y == 4).all()


def test_g03_default_dtype_is_in_the_key(device, global_state):
    """G03 https://github.com/pytorch/xla/pull/8981"""
    c = compiled(lambda i: (i * 0.5, torch.zeros(2, device=i.device), i / 3))
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        assert [x.dtype for x in c(torch.arange(2, device=device))] == [dtype] * 3


def scores(x):
    return x.softmax(0).std(1)


def test_g06_many_shapes_stay_right_and_bounded():
    """G06 https://github.com/jax-ml/jax/issues/7930"""
    import jax

    client = jax.devices("cpu")[0].client
    c = compiled(scores, dynamic=True, options={"max_specializations": 4})
    before = len(client.live_executables())
    for n in (*range(2, 18), 3, 4):
        x = torch.arange(8.0 * n).sin().reshape(n, 8)
        torch.testing.assert_close(c(x), scores(x))
    gc.collect()
    assert len(client.live_executables()) - before <= 6
    assert pure_backend.statistics().traces == 18
    assert pure_backend.Options().max_specializations <= 256


def test_g06_the_least_recently_used_goes_first(device):
    """G06 https://github.com/jax-ml/jax/issues/16778 (a shape in use stays)"""
    c = compiled(scores, dynamic=True, options={"max_specializations": 3})
    for n in range(2, 9):
        _, cost = counted(c, torch.ones(n, 8, device=device))
        assert cost == (1, 1)
        _, cost = counted(c, torch.ones(2, 8, device=device))
        assert cost == (0, 0), f"after {n}"


def test_warm_calls_trace_and_lower_nothing(device):
    """The law of the warm path: one training signature costs one trace and two lowerings, once."""

    def f(x, w):
        return (x @ w).tanh()

    c = compiled(f)
    x, w = torch.ones(2, 3, device=device), torch.ones(3, 4).to(device).requires_grad_()
    for cost in ((1, 2), (0, 0), (0, 0)):
        _, seen = counted(lambda: c(x, w).sum().backward())
        assert seen == cost
    with torch.no_grad():
        for cost in ((1, 1), (0, 0)):
            _, seen = counted(lambda: c(x, w))
            assert seen == cost
    agree(f, lambda: (torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)), device=device, grad=True)


class Numbered(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i, self.w = i, nn.Linear(4, 4)

    def forward(self, x):
        return self.w(x) + (0 if self.i < 0 else x)


def test_g09_layers_that_differ_in_a_number(device):
    """G09 https://github.com/huggingface/transformers/issues/36484"""
    layers = [Numbered(i).to(device) for i in range(12)]
    x = torch.ones(1, 4, device=device)
    for layer in layers:
        torch.testing.assert_close(compiled(layer)(x), layer(x))
    assert pure_backend.statistics().lowerings == 1
