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


# Which of several equal elements an index names is not determined; and where the dimension stands among the arguments.
TIED = {"sort": 0, "argsort": 0, "msort": 0, "topk": 1, "kthvalue": 1, "mode": 0, "median": 0, "nanmedian": 0}


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
    if op in TIED and not sample.kwargs.get("stable"):
        return Latitude(lambda result: _without_ties(op, sample, result))
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
    given = sample.args[TIED[op]] if len(sample.args) > TIED[op] else -1
    dim = sample.kwargs.get("dim", given)
    x = sample.input.detach()
    return x.gather(dim, indices if indices.ndim == x.ndim else indices.unsqueeze(dim))
