"""Annotations of torch_xla's SPMD inside of compiled functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, init=False)
class XlaSharding:
    """How a value lies on the devices of a torch_xla mesh, as a function of tensors that Dynamo can trace.

    `torch_xla.distributed.spmd.mark_sharding` ends Dynamo's graph, because it asks torch_xla of a tensor's runtime state. This
    is made once, outside, and called inside: the value has its annotation in the program, and so has its gradient.

    Args:
        mesh: A `torch_xla.distributed.spmd.Mesh`.
        partition_spec: For each dimension of a value the axes that it is split over: a name or number, a tuple of
            them, or None.

    Raises:
        ValueError: An axis that the mesh does not have, or one that is named twice.

    Example:
        >>> rows = XlaSharding(mesh, ("data", None))
        >>> compiled = torch.compile(lambda x: rows(x * 2).sin(), backend="assume_pure", fullgraph=True)
    """

    mesh: str
    partition_spec: str

    def __init__(self, mesh: Any, partition_spec: Sequence[Any]) -> None:
        axes = [axis for entry in partition_spec if entry is not None for axis in _axes(entry)]
        known = {*(mesh.axis_names or ()), *range(len(mesh.mesh_shape))}
        if strange := [axis for axis in axes if axis not in known]:
            raise ValueError(f"XlaSharding: the mesh has no axis {strange[0]!r}: it has {mesh.axis_names}")
        if len({*axes}) != len(axes):
            raise ValueError(f"XlaSharding: an axis splits one dimension of a value, got {tuple(partition_spec)}")
        object.__setattr__(self, "mesh", str(mesh))
        object.__setattr__(self, "partition_spec", str(tuple(partition_spec)))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same value, annotated.

        Args:
            tensor: An `xla` tensor with as many dimensions as the partition spec has entries.
        """
        return _annotated(tensor, self.mesh, self.partition_spec)


def _axes(entry: Any) -> tuple[Any, ...]:
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def _annotated(tensor: torch.Tensor, mesh: str, spec: str) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.xla.aot_mark_sharding(tensor, mesh, spec)
    annotated: Any = _Annotated.apply(tensor, mesh, spec)
    return annotated


class _Annotated(torch.autograd.Function):
    """The annotation where nothing is compiled."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: str, spec: str) -> torch.Tensor:
        """Annotate a value."""
        ctx.annotation = (mesh, spec)
        return torch.ops.xla.aot_mark_sharding(tensor, mesh, spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Annotate its gradient."""
        return torch.ops.xla.aot_mark_sharding(grads[0], *ctx.annotation), None, None
