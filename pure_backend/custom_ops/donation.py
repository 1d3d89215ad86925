"""Donated arguments: their memory may be reused, so they are invalid after the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pure_backend.errors import DonationError


def donated_tensors(
    op: str, donated: Sequence[str], tensors: Sequence[torch.Tensor], names: Sequence[str]
) -> list[torch.Tensor]:
    """The tensors of a call whose memory is donated.

    Args:
        op: The operator's name.
        donated: Names of the donated parameters.
        tensors: The tensors of the call.
        names: For each of them the parameter that it was given for.

    Raises:
        DonationError: A donated tensor shares memory with another argument: it would be read after it was given away, or
            given away twice.
    """
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    for i, name in enumerate(names):
        if name in donated and storages.count(storages[i]) > 1:
            other = next(n for j, n in enumerate(names) if j != i and storages[j] == storages[i])
            raise DonationError(
                f"{op}: argument {name!r} is donated, but argument {other!r} lies in the same memory: clone one of them"
            )
    return [tensor for tensor, name in zip(tensors, names, strict=True) if name in donated]
