"""The harness itself: it sees what differs, and why a case was left to eager."""

import dataclasses

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from .cases import Case, entries
from .compare import difference
from .graphs import call_of, twins
from .latitude import Latitude
from .observe import observe
from .outcome import run


def _observed(f, grad=True):
    sample = SampleInput(torch.tensor([1.0, 2.0, 3.0], requires_grad=grad))
    call = call_of(f, sample)
    return observe(call, twins(call.tensors), Latitude(lambda result: result))


def _compared(eager, compiled) -> str | None:
    return difference(entries()["sin"], _observed(eager), _observed(compiled), lambda: None)


@pytest.mark.parametrize(
    ("compiled", "what"),
    [
        (lambda x: x.sin() + 1e-3, "outputs"),
        (lambda x: x.sin().double(), "dtype"),
        (lambda x: x.sin()[None], "shape"),
        (lambda x: x.sin().detach(), "requires_grad"),
        (lambda x: x.detach().sin() + 0 * x, "grads"),
    ],
)
def test_a_difference_is_seen(compiled, what) -> None:
    assert what in (_compared(torch.sin, compiled) or "")


def test_a_write_is_seen() -> None:
    want, got = _observed(torch.sin, grad=False), _observed(torch.sin_, grad=False)
    assert (difference(entries()["sin"], want, got, lambda: None) or "").startswith("inputs")


def test_equal_sides_are_equal() -> None:
    assert _compared(torch.sin, lambda x: x.sin()) is None


def test_double_precision_decides_where_rounding_differs() -> None:
    def rounded(x):
        return (x * 1000).bfloat16().float() / 1000

    want, got, truth = _observed(rounded), _observed(lambda x: x * 1.0), _observed(lambda x: x.double())
    truth = dataclasses.replace(truth, grads=[grad.double() for grad in truth.grads])
    assert difference(entries()["sin"], want, got, lambda: truth) is None


def test_twins_keep_layout_and_shared_memory() -> None:
    base = torch.randn(4, 6)
    view, conj = base[1:, ::2], torch.randn(3, dtype=torch.complex64).conj()
    first, second, third = twins([base, view, conj])
    assert second.stride() == view.stride() and torch.equal(second, view)
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata != base.untyped_storage()._cdata
    assert third.is_conj() and torch.equal(third, conj)


def test_the_reason_of_an_eager_node_is_kept() -> None:
    outcome = run(Case("masked_select", torch.float32))
    assert (outcome.kind, outcome.detail.split(":")[0]) == ("eager", "host read")
