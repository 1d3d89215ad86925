"""Operators at real sizes, three times: between the calls inputs change in place, or are new tensors at the old addresses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import compiled, named_leaves
from steps import sync
from torch.utils import _pytree as pytree

from .cases import FAMILIES, Case

TOLERANCES = {  # of the largest value
    torch.float64: 1e-9,
    torch.float32: 3e-5,
    torch.complex64: 3e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}

NOT_ON_XLA = {
    "linear_algebra": "LAPACK's calls are left to eager there, and torch_xla's own gradient of slogdet raises",
    "products_f16": "torch_xla's CPU client takes 15 s for a call of these, and rounds sums to f16 on the way",
}


class Place:
    """Memory that a case's inputs keep from call to call."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.tensors = [given.to(device) for given in case.inputs()]
        self.call = compiled(case.function)

    def renew(self) -> None:
        """New tensor objects over the old memory."""
        self.tensors = [_again(tensor) for tensor in self.tensors]

    def run(self, values: list[torch.Tensor]) -> tuple[Any, list[Any]]:
        """The function, compiled, after its inputs were overwritten."""
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.detach().copy_(value)
        return observed(self.call, self.tensors, self.case.grad)


def _again(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())


def observed(f: Callable[..., Any], tensors: list[torch.Tensor], grad: bool) -> tuple[Any, list[Any]]:
    """Results and gradients of a call."""
    tensors = [t.detach().requires_grad_(grad and not _is_index(t)) for t in tensors]
    outputs = f(*tensors)
    heads = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not heads:
        return outputs, []
    cotangents = [_cotangent(t) for t in heads]
    wanted = [t for t in tensors if t.requires_grad]
    return outputs, list(torch.autograd.grad(heads, wanted, cotangents, allow_unused=True))


def _is_index(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _cotangent(head: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(head.shape, generator=generator).to(head.dtype).to(head.device)


def differences(name: str, want: Any, got: Any) -> list[str]:
    """Where two results differ by more than rounding."""
    pairs = zip(named_leaves(want, name), named_leaves(got, name), strict=True)
    return [f"{place}: {error}" for (place, a), (_, b) in pairs if (error := _difference(a, b))]


def _difference(want: Any, got: Any) -> str:
    if want is None or got is None:
        return "" if want is got else f"eager {want}, compiled {got}"
    want, got = want.detach(), got.detach().cpu()
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return f"{want.dtype} {want.shape} in eager, {got.dtype} {got.shape} compiled"
    if _is_index(want):
        return "" if torch.equal(want, got) else f"{(want != got).sum()} elements differ"
    wide = torch.complex128 if want.is_complex() else torch.float64
    scale = max(want.to(wide).abs().max().item(), 1e-3)
    error = (want.to(wide) - got.to(wide)).abs().max().item() / scale
    return "" if error <= TOLERANCES[want.dtype] else f"{error:.1e} of the largest value"


def _turn(places: list[Place], device: torch.device, seed: int) -> list[str]:
    torch.manual_seed(seed)
    values = [place.case.inputs() for place in places]
    got = [place.run(own) for place, own in zip(places, values, strict=True)]
    sync(device)  # on xla: one compilation for the family
    found = []
    for place, own, theirs in zip(places, values, got, strict=True):
        found += differences(place.case.name, observed(place.case.function, own, place.case.grad), theirs)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_input_changes_in_place(family: str, device: torch.device) -> None:
    if device.type == "xla" and family in NOT_ON_XLA:
        pytest.skip(NOT_ON_XLA[family])
    places = [Place(case, device) for case in FAMILIES[family]]
    for turn in range(3):
        if turn == 2 and device.type == "cpu":
            for place in places:
                place.renew()
        found = _turn(places, device, turn)
        assert not found, f"call {turn}: {found}"
