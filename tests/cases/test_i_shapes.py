"""Group I of the cases: dynamic shapes."""

import pytest
import torch
from oracle import compiled

import pure_backend


def test_i01_symint_inputs(device):
    """I01 https://github.com/pytorch/pytorch/issues/96272"""

    def f(x, n):
        return x.reshape(n, -1).sum(1) * n

    c = compiled(f, dynamic=True)
    for n in (2, 3, 1, 6):
        assert c(torch.arange(6.0).to(device), n).tolist() == f(torch.arange(6.0), n).tolist()


def test_i01_no_symbol_left(device):
    """I01 https://github.com/vllm-project/vllm/pull/39395 (Dynamo specializes sizes 0 and 1)"""

    def f(x):
        return x.cumsum(0) * x.shape[0]

    c = compiled(f, dynamic=True)
    for n in (1, 0, 1, 5):
        assert c(torch.ones(n, device=device)).tolist() == f(torch.ones(n)).tolist()


def pick(x, flag, name, bias, factor):
    y = x * factor if flag else x - factor
    y = y.sin() if name == "sin" else y.cos()
    return y if bias is None else y + bias


OTHERS = [
    (True, "sin", None, 0.5),
    (False, "cos", torch.ones(3), 0.25),
    (True, "cos", None, 3),
    (True, "sin", torch.ones(3), -1.5),
]


@pytest.mark.parametrize("dynamic", [True, None])
def test_i01_other_inputs(dynamic, device):
    """I01 https://github.com/pytorch/pytorch/issues/96272 (bool, str, None, float and int inputs)"""
    c = compiled(pick, dynamic=dynamic)
    x = torch.arange(3.0)
    for flag, name, bias, factor in OTHERS:
        there = None if bias is None else bias.to(device)
        got = c(x.to(device), flag, name, there, factor)
        torch.testing.assert_close(got.cpu(), pick(x, flag, name, bias, factor))


# torch_xla switches both off when it is imported.
@torch._dynamo.config.patch(automatic_dynamic_shapes=True, specialize_float=False)
def test_i01_a_changed_float_does_not_compile_every_time(device):
    """I01 https://github.com/pytorch/pytorch/issues/96272 (a learning rate, a temperature)"""

    def f(x, rate):
        return x - rate * x.cos()

    c = compiled(f)
    x = torch.arange(3.0)
    for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        torch.testing.assert_close(c(x.to(device), rate).cpu(), f(x, rate))
    assert pure_backend.statistics().traces <= 2
