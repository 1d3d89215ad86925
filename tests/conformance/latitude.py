"""What of an operator's result is not determined, and is compared by a property instead of by value."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

from .cases import Case

# Drawn from another generator than eager's: compared are dtype and shape. tests/test_random.py tests the distributions.
RANDOM = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "nn_functional_alpha_dropout",
        "nn_functional_dropout",
        "nn_functional_dropout2d",
        "nn_functional_dropout3d",
        "nn_functional_feature_alpha_dropout_with_train",
        "nn_functional_fractional_max_pool2d",
        "nn_functional_fractional_max_pool3d",
        "nn_functional_rrelu",
        "normal",
        "normal_in_place",
        "normal_number_mean",
        "pca_lowrank",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "svd_lowrank",
        "uniform",
    }
)

# Memory that nobody wrote.
UNINITIALIZED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


# Which of several equal elements an index names is not determined; and where the dimension stands among the arguments.
TIED = {"sort": 0, "argsort": 0, "msort": 0, "topk": 1, "kthvalue": 1, "mode": 0, "median": 0, "nanmedian": 0}


# Which of several equal elements a selection names has the gradient.
SELECTS_ONE = frozenset({"kthvalue", "mode", "median", "nanmedian", "topk"})

_NOT_FINITE = ("one_infinite", "infinite", "one_nan", "nan")
_FAR_APART = ("large", "largest")

# What eager itself does not determine at special points: operators, fillings, and why.
UNDETERMINED = (
    (
        r"(linalg_)?(cholesky|lu|qr|svd|eig|inv|pinv|solve|slogdet|det|householder|lstsq|ldl|tensorinv|tensorsolve|matrix_rank)\w*"
        r"|(linalg_)?(matrix_norm|cond|matrix_power)\w*|ormqr|geqrf|logdet|pinverse|symeig|triangular_solve|norm_nuc|matrix_exp",
        None,
        "what LAPACK gives for singular, indefinite or infinite matrices, and its gradient, is rounding",
    ),
    (r"\w*conv\w*", (*_NOT_FINITE, *_FAR_APART), "a zero of the padding times infinity is NaN, where it is multiplied at all"),
    (r"\w*(stft|fft)\w*", (*_NOT_FINITE, *_FAR_APART), "a transform mixes its elements in an order of its own"),
    (r"add(bmm|mm|mv|r)\w*|baddbmm", _FAR_APART, "a scale is multiplied before or after the product"),
    (
        r"\w*(layer|batch|group|instance)_norm\w*",
        (*_NOT_FINITE, *_FAR_APART),
        "means of numbers that far apart cancel; scale and shift are applied together or one after the other",
    ),
    (r"(var|std)(_mean)?(_unbiased)?", (*_NOT_FINITE, "largest"), "a running mean on the CPU, of doubles"),
    (
        r"prod|cumprod|masked_(cum)?prod|(linalg_)?vander",
        _NOT_FINITE,
        "eager divides by an element where none is zero: it looks at values",
    ),
    (
        r"(nn_functional_(adaptive_)?max_pool\w*)",
        ("one_nan", "nan"),
        "which element of a window with NaN has the gradient: XLA's selection compares",
    ),
    (
        r"nn_functional_(hardswish|hardtanh|relu6|hardsigmoid|hardshrink|softshrink|threshold)",
        ("one_nan", "nan"),
        "eager's vectors and the rest behind them treat the gradient of NaN differently",
    ),
    (
        r"(masked_|\w*_reduce_)?(amax|amin)|aminmax",
        ("one_nan", "nan"),
        "XLA takes a product with a bool for a selection, in which NaN is lost",
    ),
    (r"\w*bilinear|einsum|\w*matmul\w*|mm|bmm|mv|linalg_multi_dot", (*_NOT_FINITE, *_FAR_APART), "the order of products"),
    (
        r"(special_)?(polygamma|psi|digamma)\w*|mvlgamma\w*",
        ("ones", "integers", "halves", "knees", "steep", "large", "largest", *_NOT_FINITE),
        "at poles left of zero eager gives the rounding of pi",
    ),
    (
        r"mvlgamma\w*",
        ("zeros", "subnormal"),
        "XLA drops an addition of zero, and with it the sign of a zero, at which there is a pole",
    ),
    (
        r"logit",
        ("zeros", "all_zero", "subnormal", "one_nan", "nan"),
        "eager's vectors and the rest behind them differ at -0 and NaN",
    ),
    (r"nn_functional_multilabel_soft_margin_loss", ("infinite",), "an infinite label: the order of its products"),
    (r"(scatter|index)_reduce_prod", ("smallest",), "products of the smallest numbers are subnormal, and zero in XLA:CPU"),
    (
        r"special_(\w+_)?\w+_polynomial_\w+",
        ("large",),
        "eager takes as many steps as the degree, here 1e15, and does not end",
    ),
    (r"special_(\w+_)?\w+_polynomial_\w+", ("nan",), "a degree that is NaN is no integer in C++"),
    (r"special_modified_bessel_k0", ("smallest",), "half of the smallest number is subnormal, and zero in XLA:CPU"),
    (r"mode", ("one_nan", "nan"), "eager sorts by `<`, which a NaN breaks"),
    (r"native_dropout_backward", _NOT_FINITE, "XLA takes a product with a bool for a selection, in which NaN is lost"),
    (r"frexp", ("subnormal",), "XLA:CPU takes subnormal numbers for zero; torch's frexp reads their bits"),
)


def undetermined(case: Case) -> bool:
    """Whether eager does not determine what becomes of a case at its special points."""
    return any(
        re.fullmatch(ops, case.op) and (points is None or case.points in points)
        for ops, points, _ in UNDETERMINED
        if case.points
    )


@dataclasses.dataclass(frozen=True)
class Latitude:
    """What to compare of a call.

    Attributes:
        result: Takes what is not determined out of a result; gradients are taken through it too.
        inputs: The same for the inputs after the call.
        grads: The same for the gradients.
        undetermined: Whether nothing of the result is determined.
    """

    result: Callable[[Any], Any]
    inputs: Callable[[Any], Any] = list
    grads: Callable[[Any], Any] = list
    undetermined: bool = False


def latitude(case: Case, sample: SampleInput) -> Latitude:
    """The latitude of a case.

    For factorizations whose factors have free signs or phases, torch's own samples say what is free of them
    (`output_process_fn_grad`: absolute values of eigenvectors, for instance).
    """
    op = case.op
    if undetermined(case):
        return Latitude(_zeroed, _zeroed, _zeroed, undetermined=True)
    if op in RANDOM or op in UNINITIALIZED:
        return Latitude(_zeroed, _zeroed, undetermined=True)
    if op in TIED and not sample.kwargs.get("stable"):
        grads = functools.partial(_summed, _dim(op, sample)) if case.points and op in SELECTS_ONE else list
        return Latitude(lambda result: _without_ties(op, sample, result), grads=grads)
    return Latitude(sample.output_process_fn_grad)


def _zeroed(values: Any) -> Any:
    """Nothing of the values; the gradient of zero reaches nobody."""
    return pytree.tree_map_only(torch.Tensor, torch.zeros_like, values)


def _without_ties(op: str, sample: SampleInput, result: Any) -> list[torch.Tensor]:
    """The values, the elements that indices name, and a number whose gradient is the same for equal elements."""
    settled = []
    for leaf in pytree.tree_leaves(result):
        if leaf.dtype == torch.int64 and (op == "argsort" or settled):
            settled.append(_named(op, sample, leaf))
        else:
            settled += [leaf.detach(), (leaf * leaf.conj()).real.sum()] if leaf.requires_grad else [leaf]
    return settled


def _named(op: str, sample: SampleInput, indices: torch.Tensor) -> torch.Tensor:
    """The elements of the sample that indices name."""
    x = sample.input.detach()
    return x.gather(_dim(op, sample), indices if indices.ndim == x.ndim else indices.unsqueeze(_dim(op, sample)))


def _dim(op: str, sample: SampleInput) -> int:
    """The dimension that an operator works along."""
    return sample.kwargs.get("dim", sample.args[TIED[op]] if len(sample.args) > TIED[op] else -1)


def _summed(dim: int, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients summed over equal elements: all of a row."""
    return [grad if grad is None or not grad.ndim else grad.sum(dim) for grad in grads]
