"""`assume_pure` and `PureModule`: traced once per signature, and as eager in all that a caller sees."""

import pytest
import torch
from torch import nn

import pure_backend
from pure_backend import PureModule, assume_pure


def numbers(*shape, grad=False):
    torch.manual_seed(5)
    return torch.randn(*shape).requires_grad_(grad)


def test_once_for_a_thousand_calls(device):
    """A function object made anew for every call is traced once."""
    module = nn.Linear(3, 3).to(device)
    params, buffers, x = dict(module.named_parameters()), dict(module.named_buffers()), numbers(2, 3).to(device)
    for i in range(1000):
        if i % 10 == 0:
            f = assume_pure(lambda params, buffers, x: torch.func.functional_call(module, (params, buffers), (x,)))
        y = f(params, buffers, x)
    torch.testing.assert_close(y, module(x))
    assert pure_backend.statistics().traces == 1


def test_trees_and_static_arguments(device):
    @assume_pure
    def f(tree, scale, name, dtype, nothing, flag=True):
        assert name == "sum" and nothing is None
        x, (y, n) = tree["x"], tree["rest"]
        return {"out": (x * scale + y).to(dtype) if flag else x, "n": n + 1, "nothing": nothing}

    tree = {"x": numbers(3).to(device), "rest": (torch.ones(3, device=device), 4)}
    got = f(tree, 2.0, "sum", torch.float64, None)
    assert got["n"] == 5 and got["nothing"] is None and got["out"].dtype is torch.float64
    torch.testing.assert_close(got["out"].cpu(), (numbers(3) * 2 + 1).double())
    torch.testing.assert_close(f(tree, 2, "sum", torch.float32, None, flag=False)["out"].cpu(), numbers(3))


def test_more_shapes_than_dynamo_keeps():
    f = assume_pure(lambda x: (x * 2).sum())
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        assert [f(torch.ones(n)).item() for n in range(1, 21)] == [2 * n for n in range(1, 21)]


def test_gradients_of_any_order(device):
    f = assume_pure(lambda x: x.sin().sum())
    x = numbers(4).to(device).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(g.detach().cpu(), x.detach().cpu().cos())
    torch.testing.assert_close(h.cpu(), -x.detach().cpu().sin())


def test_closures_are_read_afresh_and_writes_come_back(device):
    state = torch.zeros(2, device=device)

    @assume_pure
    def f(x):
        state.add_(1)
        x.mul_(2)
        return x + state

    x = torch.ones(2, device=device)
    assert f(x).tolist() == [3, 3] and x.tolist() == [2, 2]
    state.fill_(10)
    assert f(x).tolist() == [15, 15] and state.tolist() == [11, 11]


def test_random_numbers(device):
    f = assume_pure(lambda x: x + torch.rand(3, device=x.device))
    zeros = torch.zeros(3, device=device)
    torch.manual_seed(1)
    a, b = f(zeros), f(zeros)
    torch.manual_seed(1)
    assert torch.equal(f(zeros), a) and not torch.equal(a, b)
    seeded = assume_pure(lambda x: x + torch.rand(3, device=x.device), add_rng_seed_argument=True)
    before = torch.get_rng_state()
    one, other, again = (seeded(zeros, rng_seed=seed) for seed in (1, 2, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TypeError, match="rng_seed"):
        seeded(zeros)


def test_nested_and_inside_compiled_functions(device):
    @assume_pure
    def inner(x):
        return x.sin()

    outer = assume_pure(lambda x: inner(x) + inner(x * 2))
    x = numbers(3).to(device)
    want = x.sin() + (x * 2).sin()
    torch.testing.assert_close(outer(x), want)
    torch.testing.assert_close(torch.compile(outer, backend="assume_pure", fullgraph=True)(x), want)
    assert pure_backend.statistics().traces <= 2


def prints(x):
    """Needs the value of a tensor."""
    if x.sum().item() > 0:
        return x * 2
    return x * 3


def test_an_impure_function_is_found():
    f = assume_pure(prints)
    with pytest.warns(pure_backend.ImpureFunctionWarning, match=r"prints is not pure.*test_pure\.py"):
        assert f(torch.ones(2)).tolist() == [2, 2]
    assert f(-torch.ones(2)).tolist() == [-3, -3]


def test_check_runs_twice():
    calls = []

    def counts(x):
        calls.append(1)
        return x * len(calls)

    with pytest.raises(pure_backend.PureBackendError, match="counts is not pure: two calls"):
        assume_pure(counts, check=True)(torch.ones(2))
    with pytest.raises(pure_backend.PureBackendError, match="changed an argument"):
        assume_pure(lambda x: x.add_(1), check=True)(torch.ones(2))
    assert assume_pure(lambda x: x + torch.rand(2) * 0, check=True)(torch.ones(2)).tolist() == [1, 1]


def test_modules(device):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    twin.load_state_dict(module.state_dict())
    pure = PureModule(module)
    assert [name for name, _ in pure.named_parameters()] == [f"_module.{name}" for name, _ in module.named_parameters()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pure, twin)]
    for _ in range(3):
        for m, optimizer, x in zip((pure, twin), optimizers, (numbers(5, 3).to(device), numbers(5, 3)), strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(module.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    pure.eval()
    twin.eval()
    torch.testing.assert_close(pure(numbers(5, 3).to(device)).cpu(), twin(numbers(5, 3)), rtol=1e-4, atol=1e-5)
    assert pure_backend.statistics().traces == 2


def test_captures_are_kept_by_code():
    """One for all function objects of one code, none for a code that is gone, another for an equal code elsewhere."""
    import gc

    from pure_backend.transforms import capture

    def make():
        return lambda x: x + 1

    assert capture.captured_for(make()) is capture.captured_for(make())
    before = len(capture._by_id)
    one, other = (eval("lambda x: x + 7") for _ in range(2))
    assert one.__code__ == other.__code__ and capture.captured_for(one) is not capture.captured_for(other)
    del one, other
    gc.collect()
    assert len(capture._by_id) == before
