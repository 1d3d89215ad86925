"""Several models and threads at once."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import compiled
from torch import nn

import pure_backend


def networks(n) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, i + 2), nn.Tanh(), nn.Linear(i + 2, 1)) for i in range(n)]


def train(call, m, steps=3) -> list[torch.Tensor]:
    for i in range(steps):
        x = torch.linspace(-1, 1, 6).reshape(2, 3) + i
        call(x).square().sum().backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
    return [p.detach().clone() for p in m.parameters()]


def test_each_thread_trains_its_own_model():
    """Different models in different threads: the parameters of a serial run."""
    eager = networks(4)
    ours = copy.deepcopy(eager)
    want = [train(m, m) for m in eager]
    calls = [compiled(m) for m in ours]  # here: Dynamo's look-up of a backend by name is not made for threads
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(train, calls, ours))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_models_interleaved(device):
    """Two models called in turn: neither evicts or serves the other."""
    a, b = (m.to(device) for m in networks(2))
    ca, cb = compiled(a), compiled(b)
    x = torch.ones(2, 3, device=device)
    for _ in range(3):
        torch.testing.assert_close(ca(x).cpu(), a(x).cpu(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cb(x).cpu(), b(x).cpu(), rtol=1e-4, atol=1e-5)
    assert pure_backend.statistics().traces == 2


def test_backward_in_another_thread():
    """Forward here, backward there."""
    x = torch.ones(3, requires_grad=True)
    y = compiled(lambda x: (x * x).sum())(x)
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert x.grad.tolist() == [2, 2, 2]


def test_modes_are_per_thread():
    """`no_grad` in one thread says nothing about another."""
    c = compiled(lambda x: x * 2)
    x = torch.ones(3, requires_grad=True)

    def call(recording):
        with torch.set_grad_enabled(recording):
            return [c(x).requires_grad for _ in range(20)]

    call(True), call(False)
    with ThreadPoolExecutor(4) as pool:
        for recording, seen in zip([True, False] * 4, pool.map(call, [True, False] * 4), strict=True):
            assert seen == [recording] * 20


def test_one_model_many_shapes_many_threads():
    """Specializations made at the same time; not `dynamic=True`, which sets Dynamo's global config in each call."""
    m = nn.Linear(4, 2)
    c = compiled(m)

    def call(n):
        x = torch.linspace(0, 1, n * 4).reshape(n, 4)
        torch.testing.assert_close(c(x), m(x))
        return n

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, [2, 3, 4, 5] * 4)) == [2, 3, 4, 5] * 4


def test_random_streams_in_threads_are_not_equal():
    """Threads draw from one generator: no two get the same numbers."""
    c = compiled(lambda x: x + torch.rand(4))
    c(torch.zeros(4))
    with ThreadPoolExecutor(4) as pool:
        draws = list(pool.map(lambda _: tuple(c(torch.zeros(4)).tolist()), range(16)))
    assert len(set(draws)) == 16


def test_writes_in_threads_do_not_interfere():
    """Each thread increments its own tensor."""
    c = compiled(lambda x: x.add_(1).sum())
    c(torch.zeros(8))

    def count(i):
        x = torch.full((8,), float(i))
        for _ in range(10):
            c(x)
        return x.tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count, range(8))) == [[i + 10.0] * 8 for i in range(8)]


def test_results_are_not_overwritten_by_the_next_call():
    """Buffers of earlier results stay theirs while other calls run."""
    c = compiled(lambda x: x * 2)
    results = [c(torch.full((100,), float(i))) for i in range(20)]
    for i, y in enumerate(results):
        assert (y == 2 * i).all()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((3,), float(i)) ** 2


@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_data_loader_workers_after_a_compiled_call():
    """Forked workers make tensors after JAX has started its threads."""
    c = compiled(lambda x: x + 1)
    c(torch.zeros(2, 3))
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
    assert [c(batch)[:, 0].tolist() for batch in loader] == [[1, 2], [5, 10]]
