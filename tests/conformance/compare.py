"""Eager against compiled: values by dtype, everything else exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo

from .observe import Observed

# torch.testing.assert_close's defaults, ten times as wide in f32: XLA fuses and orders sums differently.
_TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (1.3e-5, 5e-5),
    torch.complex64: (1.3e-5, 5e-5),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
}

# Gradients that multiply rounding, eager's as well.
_LOOSE = {
    ("logcumsumexp", torch.float32): (5e-3, 5e-3),  # exponentials of differences of numbers near 10,000: eager is off by 3e-3
    ("logcumsumexp", torch.complex64): (5e-3, 5e-3),
    ("special.ndtri", torch.float32): (1e-4, 5e-5),  # exp(y * y / 2) of y = -13 multiplies the rounding of y by 170
}


def difference(entry: OpInfo, want: Observed, got: Observed, truth: Callable[[], Observed | None]) -> str | None:
    """The first difference between eager and compiled, or None.

    Args:
        entry: The operator.
        want: Eager's side.
        got: The compiled side.
        truth: Eager's side in double precision, where the operator has it; asked for only when values differ.
    """
    if want.flags != got.flags:
        return f"dtype, shape or requires_grad: eager {want.flags}, compiled {got.flags}"
    for name in ("outputs", "inputs", "grads"):
        text = _values(entry, name, getattr(want, name), getattr(got, name), truth)
        if text is not None:
            return text
    return None


def _values(entry: OpInfo, name: str, want: Sequence[Any], got: Sequence[Any], truth: Callable[[], Observed | None]):
    if len(want) != len(got):
        return f"{name}: eager has {len(want)}, compiled {len(got)}"
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if (text := _unlike(entry, a, b)) is None:
            continue
        exact = truth()
        if exact is None or not _as_good(entry, getattr(exact, name)[i], a, b):
            return f"{name}[{i}]: {text}"
    return None


def _unlike(entry: OpInfo, want: Any, got: Any) -> str | None:
    """How two leaves differ, or None."""
    if want is None and isinstance(got, torch.Tensor) and _without_gradient(entry, got):
        return None
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return None if type(want) is type(got) and want == got else f"eager {want!r}, compiled {got!r}"
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"eager {want.dtype}{list(want.shape)}, compiled {got.dtype}{list(got.shape)}"
    rtol, atol = tolerance(entry, want.dtype)
    try:
        torch.testing.assert_close(_plain(got), _plain(want), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return f"{' '.join(str(error).split())}; {_first_unlike(_plain(want), _plain(got), rtol, atol)}"
    return None


def _without_gradient(entry: OpInfo, got: torch.Tensor) -> bool:
    """Whether eager has no gradient where a program has zeros: that of empty matrices, and of norms of order 0."""
    return got.numel() == 0 or ("norm" in entry.name and not got.any())


def _first_unlike(want: torch.Tensor, got: torch.Tensor, rtol: float, atol: float) -> str:
    """The first few elements that differ, from both sides."""
    unlike = ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    places = unlike.nonzero()[:4].tolist()
    return f"at {places} eager {want[unlike][:4].tolist()}, compiled {got[unlike][:4].tolist()}"


def tolerance(entry: OpInfo, dtype: torch.dtype) -> tuple[float, float]:
    """`(rtol, atol)`: those of the dtype, or the operator's own where torch's tests of it need more."""
    rtol, atol = _LOOSE.get((entry.name, dtype), _TOLERANCE.get(dtype, (0.0, 0.0)))
    for decorator in entry.decorators:
        for inner in decorator.decorators if isinstance(decorator, DecorateInfo) else [decorator]:
            if isinstance(inner, toleranceOverride) and dtype in inner.d:
                rtol, atol = max(rtol, inner.d[dtype].rtol), max(atol, inner.d[dtype].atol)
    return rtol, atol


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _as_good(entry: OpInfo, exact: Any, want: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether compiled is right in double precision, or about as near to it as eager is.

    Eager rounds a 16-bit composite after each step, and ill-conditioned problems amplify any rounding: there two right answers
    differ by more than any fixed tolerance.
    """
    if not isinstance(exact, torch.Tensor) or exact.shape != want.shape or not exact.dtype.itemsize > want.dtype.itemsize:
        return False
    return _unlike(entry, exact.to(want.dtype), got) is None or _no_further(exact, want, got)


def _no_further(exact: torch.Tensor, want: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether compiled is no further than thrice as far from `exact` as eager, which has to be right to half of its digits."""
    finite = torch.isfinite(exact) & torch.isfinite(want) & torch.isfinite(got)
    same = (want == got) | (torch.isnan(want) & torch.isnan(got))
    if not bool((finite | same).all()):
        return False
    eager, compiled = (_distance(side, exact, finite) for side in (want, got))
    scale = exact[finite].abs().max().item() if finite.any() else 0.0
    eps = torch.finfo(want.dtype).eps
    return eager <= eps**0.5 * scale and compiled <= 3 * eager + 8 * eps * scale


def _distance(side: torch.Tensor, exact: torch.Tensor, where: torch.Tensor) -> float:
    gaps = (side.detach().to(exact.dtype) - exact.detach())[where].abs()
    return gaps.max().item() if gaps.numel() else 0.0
