"""What of a call is looked at before the plan of the one before it is used again."""

import pytest
import torch

from pure_backend.calls.guard import Guard
from pure_backend.calls.signature import signature
from pure_backend.ir.geometry import Placed


def batch():
    torch.manual_seed(0)
    return [torch.randn(2, 3), torch.randn(4, requires_grad=True), 3, torch.arange(5)]


def test_a_guard_accepts_equal_metadata():
    guard = Guard(batch())
    assert guard(batch())
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert guard(batch())


def transposed(args):
    args[0] = torch.randn(3, 2).t()


def longer(args):
    args[1] = torch.randn(5, requires_grad=True)


def frozen(args):
    args[1].requires_grad_(False)


def other_int(args):
    args[2] = 4


def bool_for_int(args):
    args[2] = True


def narrowed(args):
    args[3] = args[3].int()


def int_for_tensor(args):
    args[3] = 5


ALL = Placed(frozenset(range(4)))

CHANGES = [transposed, longer, frozen, other_int, bool_for_int, narrowed, int_for_tensor]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_guard_refuses_other_arguments(change):
    guard, args = Guard(batch()), batch()
    change(args)
    assert not guard(args)
    assert signature(args) != signature(batch())


def test_a_guard_refuses_other_modes():
    guard = Guard(batch())
    with torch.no_grad():
        assert not guard(batch())
    with torch.autocast("cpu", torch.bfloat16):
        assert not guard(batch())
    torch.set_default_dtype(torch.float64)
    try:
        assert not guard(batch())
    finally:
        torch.set_default_dtype(torch.float32)
    assert guard(batch())


def test_overlaps_count_when_something_is_written():
    x = torch.arange(6.0)
    apart, shared = [x[:3], torch.arange(6.0)[3:]], [x[:3], x[3:]]
    assert Guard(apart)(shared)
    assert not Guard(apart, ALL)(shared)
    assert not Guard(shared, ALL)(apart)
    assert Guard(shared, ALL)(shared)


def test_one_tensor_given_twice_is_left_to_the_full_signature():
    x = torch.ones(3)
    assert not Guard([x, x])([x, x])
