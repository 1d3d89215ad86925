"""What each rank gives of a batch, as DTensors on the mesh of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pure_backend.errors import UnsupportedOperatorError
from pure_backend.ir.layout import Layout, MeshOfRanks, cuts_of, is_distributed, wrapped


def parts_of_batch(model: nn.Module, batch: Any, micro_batches: int) -> Callable[[Any], Any] | None:
    """How a leaf of the batch becomes a DTensor; None if the model has no DTensors.

    Args:
        model: The model.
        batch: A placement on the first axis of the mesh, or one for each axis; None if every rank has the whole batch.
        micro_batches: How many micro-batches there are.

    Raises:
        ValueError: The placements do not fit, or the model has no DTensors that they are for.
        UnsupportedOperatorError: It trains plain parameters too.
    """
    first = next((p for p in (*model.parameters(), *model.buffers()) if is_distributed(p)), None)
    if first is None:
        if batch is not None:
            raise ValueError("TrainStep: batch=... is for a model of DTensors (see pure_backend.distributed.shard)")
        return None
    _check_distributed(model)
    if micro_batches > 1:
        raise ValueError("TrainStep: grad_accumulation is not for a model of DTensors yet")
    mesh = MeshOfRanks.of(first.device_mesh)
    cuts = _cuts(batch, mesh)

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or is_distributed(leaf):
            return leaf
        own = Layout(mesh, cuts if leaf.ndim else (None,) * len(cuts))
        shape = list(leaf.shape)
        for size, cut in zip(mesh.shape, own.cuts, strict=True):
            if cut is not None:
                shape[cut] *= size
        return wrapped(leaf, own, shape)

    return part


def _cuts(batch: Any, mesh: MeshOfRanks) -> tuple[int | None, ...]:
    if batch is None:
        return (None,) * len(mesh.shape)
    placements = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    if len(placements) > len(mesh.shape):
        raise ValueError(f"TrainStep: batch has {len(placements)} placements, {mesh} has {len(mesh.shape)} axes")
    cuts = cuts_of(placements, 64)
    if isinstance(cuts, str):
        raise ValueError(f"TrainStep: the batch is {cuts}")
    return (*cuts, *(None,) * (len(mesh.shape) - len(cuts)))


def _check_distributed(model: nn.Module) -> None:
    """Whether a model with DTensors has nothing else to train.

    Raises:
        UnsupportedOperatorError: It has; its gradient would be that of one rank.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_distributed(parameter):
            raise UnsupportedOperatorError(
                f"TrainStep: parameter {name!r} is a plain tensor beside DTensors: distribute it too"
            )
