"""What of an operator's result is not determined, and is compared by a property instead of by value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

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


@dataclasses.dataclass(frozen=True)
class Latitude:
    """What to compare of a call.

    Attributes:
        result: Takes what is not determined out of a result; gradients are taken through it too.
        inputs: The same for the inputs after the call.
    """

    result: Callable[[Any], Any]
    inputs: Callable[[Any], Any] = list


def latitude(op: str, sample: SampleInput) -> Latitude:
    """The latitude of an operator.

    For factorizations whose factors have free signs or phases, torch's own samples say what is free of them
    (`output_process_fn_grad`: absolute values of eigenvectors, for instance).
    """
    if op in RANDOM or op in UNINITIALIZED:
        return Latitude(_zeroed, _zeroed)
    return Latitude(sample.output_process_fn_grad)


def _zeroed(values: Any) -> Any:
    """Nothing of the values; the gradient of zero reaches nobody."""
    return pytree.tree_map_only(torch.Tensor, torch.zeros_like, values)
