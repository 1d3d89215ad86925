"""How a tensor lies on a mesh of processes: what DTensor's mesh and placements say, as plain values that can be compared.

Law: `wrapped(local, layout_of(tensor), tensor.shape)` of a DTensor's local tensor stands for what the DTensor stands for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class MeshOfRanks:
    """A DeviceMesh: equal ones have the same axes over the same ranks in the same order.

    Attributes:
        shape: How many ranks each axis has.
        names: The names of the axes.
        ranks: The ranks in row-major order.
        device_type: What the ranks' tensors lie on.
        device_mesh: The DeviceMesh itself.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    device_type: str
    device_mesh: Any = dataclasses.field(compare=False, repr=False)

    @classmethod
    def of(cls, device_mesh: Any) -> MeshOfRanks:
        """That of a DeviceMesh; axes without names are called `axis0`, `axis1`, ..."""
        names = device_mesh.mesh_dim_names or [f"axis{i}" for i in range(device_mesh.ndim)]
        ranks = device_mesh.mesh
        return cls(tuple(ranks.shape), tuple(names), tuple(ranks.flatten().tolist()), device_mesh.device_type, device_mesh)

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], str]:
        """What a graph says of it, see `functional_ops.Axes`."""
        return self.shape, self.names, self.ranks, self.device_type

    def __str__(self) -> str:
        axes = ", ".join(f"{name}: {size}" for name, size in zip(self.names, self.shape, strict=True))
        return f"mesh({axes}; ranks {list(self.ranks)})"


Cuts = tuple[int | None, ...]
"""For each axis of a mesh the dimension of a tensor that is cut along it; None where every rank has the whole."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the parts of a tensor lie."""

    mesh: MeshOfRanks
    cuts: Cuts

    @property
    def placements(self) -> list[Any]:
        """As DTensor writes it."""
        from torch.distributed.tensor import Replicate, Shard

        return [Replicate() if cut is None else Shard(cut) for cut in self.cuts]

    def undivided(self, shape: Sequence[int]) -> str:
        """Why a shape does not divide over the mesh, or an empty string."""
        for dim in {cut for cut in self.cuts if cut is not None}:
            axes = [i for i, cut in enumerate(self.cuts) if cut == dim]
            if shape[dim] % (parts := math.prod(self.mesh.shape[i] for i in axes)):
                return f"dimension {dim} of size {shape[dim]} does not divide by the {parts} ranks of {self.mesh}"
        return ""


def is_distributed(value: Any) -> bool:
    """Whether a value is a DTensor."""
    cls = type(value)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.")


def cuts_of(placements: Sequence[Any], ndim: int) -> Cuts | str:
    """What placements cut, or why a program's input cannot lie so."""
    from torch.distributed.tensor import Replicate, Shard

    for placement in placements:
        if type(placement) not in (Replicate, Shard):
            return f"placed {placement!r}, which is no value that lies on each rank: redistribute it first"
    return tuple(p.dim % max(ndim, 1) if type(p) is Shard else None for p in placements)


def layout_of(tensor: Any) -> Layout | str:
    """How a DTensor lies, or why a program cannot take it."""
    mesh, cuts = MeshOfRanks.of(tensor.device_mesh), cuts_of(tensor.placements, tensor.ndim)
    if isinstance(cuts, str):
        return f"a DTensor {cuts}"
    layout = Layout(mesh, cuts)
    if 1 in mesh.shape:
        return f"a DTensor on a mesh with an axis of one rank ({mesh}): leave the axis out"
    wrong = layout.undivided(tensor.shape) or _unreached(mesh)
    return f"a DTensor: {wrong}" if wrong else layout


def _unreached(mesh: MeshOfRanks) -> str:
    """Why programs of this process do not reach a mesh, or an empty string."""
    if not _connected:
        return "programs over several processes need pure_backend.distributed.initialize() at the start"
    if sorted(mesh.ranks) != list(range(connected())):
        return f"it lies on {mesh}, which is not all of the {connected()} ranks"
    return ""


_connected: list[float] = []


def connect(world: int, limit_s: float) -> None:
    """Note that programs reach the devices of so many ranks, and how long they wait for each other."""
    _connected[:] = [world, limit_s]


def connected() -> int:
    """How many ranks programs reach; 0 before `connect`."""
    return int(_connected[0]) if _connected else 0


def time_limit() -> float:
    """How many seconds a rank waits for another one."""
    return _connected[1]


def wrapped(local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> torch.Tensor:
    """The DTensor of a row-major local tensor, which nothing else refers to then; it has no gradient."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), local.dtype)
    spec = DTensorSpec(layout.mesh.device_mesh, tuple(layout.placements), meta)
    return DTensor(local, spec, requires_grad=False)


def on_every_rank(tensor: torch.Tensor, mesh: MeshOfRanks) -> torch.Tensor:
    """The DTensor of a plain tensor that every rank has; the tensor gets its gradient."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, mesh.device_mesh, everywhere(mesh).placements, run_check=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """For a DTensor a plain tensor of its global shape, without its values; another tensor as it is."""
    if not is_distributed(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def part_like(value: Any, like: torch.Tensor) -> Any:
    """A plain tensor of a DTensor's shape as a DTensor that lies like it; another value as it is."""
    if not (is_distributed(like) and isinstance(value, torch.Tensor) and value.shape == like.shape):
        return value
    layout = layout_of(like)
    if isinstance(layout, str):
        raise ValueError(layout)
    own = value
    for size, cut, place in zip(layout.mesh.shape, layout.cuts, like.device_mesh.get_coordinate(), strict=True):
        own = own if cut is None else own.chunk(size, cut)[place]
    return wrapped(own.clone(memory_format=torch.contiguous_format), layout, value.shape)


def everywhere(mesh: MeshOfRanks) -> Layout:
    """The layout of a value that every rank has."""
    return Layout(mesh, (None,) * len(mesh.shape))
