"""How the inputs of a program lie on a mesh of TPU devices that are described, not present."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.tensor.placement_types import Placement

from pure_backend.inspect.topology import tpu_topology
from pure_backend.inspect.torch_program import Owner
from pure_backend.ir.layout import cuts_of
from pure_backend.jax_bridge.mesh import partition_spec


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where inputs lie: parameters by rule, states as their parameter, the batch along the first axis, the rest everywhere.

    Attributes:
        mesh: The devices.
        rules: By pattern of a parameter's name a partition spec or placements, see `layout`.
        batch: The same for what is neither parameter nor state.
    """

    mesh: Mesh
    rules: Mapping[str, Any]
    batch: Any

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh and their sizes."""
        return dict(self.mesh.shape)

    def shardings(self, inputs: Sequence[tuple[Owner, tuple[int, ...]]]) -> list[NamedSharding]:
        """The sharding of each input, told by its owner and shape.

        Raises:
            ValueError: A rule that no input matches, or a dimension that its devices do not divide.
        """
        names = {owner.name for owner, _ in inputs}
        for pattern in self.rules:
            if not fnmatch.filter(names, pattern):
                raise ValueError(f"compile_for_tpu: rule {pattern!r} matches no parameter; there are {sorted(names)[:6]}, ...")
        return [NamedSharding(self.mesh, self._spec(owner, shape)) for owner, shape in inputs]

    def _spec(self, owner: Owner, shape: tuple[int, ...]) -> PartitionSpec:
        names = tuple(self.axes)
        if owner.kind == "batch":
            spec = _spec(self.batch, names, "batch", len(shape))
            return spec if shape and _divides(spec, shape, self.axes) is None else PartitionSpec()
        pattern = next((pattern for pattern in self.rules if fnmatch.fnmatchcase(owner.name, pattern)), None)
        if pattern is None or owner.shape != shape:  # a counter of the optimizer's has its parameter's name
            return PartitionSpec()
        spec = _spec(self.rules[pattern], names, f"rule {pattern!r}", len(shape))
        if (wrong := _divides(spec, shape, self.axes)) is not None:
            raise ValueError(f"compile_for_tpu: {owner.name} of shape {shape} cannot be split as {spec} says: {wrong}")
        return spec


def layout(topology: str, mesh: Mapping[str, int], rules: Mapping[str, Any] | None, batch: Any = None) -> Layout:
    """A layout on all devices of a topology.

    Args:
        topology: As `"v5e:4x4"`.
        mesh: The axes of the mesh and their sizes, as `{"dp": 4, "tp": 4}`.
        rules: By pattern of a parameter's name (`"*.up.weight"`) how it is split: a partition spec (for each dimension an axis,
            several, or None), or a DTensor placement for each axis of the mesh. The first that matches counts.
        batch: The same for the batch; by default its first dimension is split over the first axis.

    Raises:
        ValueError: The mesh has not as many devices as the topology, or a rule names an axis that it does not have.
    """
    described = tpu_topology(topology)
    if (count := math.prod(mesh.values())) != len(described.devices):
        raise ValueError(f"compile_for_tpu: mesh {dict(mesh)} has {count} devices, {topology} has {len(described.devices)}")
    names = tuple(mesh)
    split = (names[0],) if batch is None else batch
    return Layout(topologies.make_mesh(described, tuple(mesh.values()), names), dict(rules or {}), split)


def _spec(rule: Any, names: tuple[str, ...], what: str, ndim: int) -> PartitionSpec:
    """A rule, in either form, as a partition spec of a value of so many dimensions."""
    placements = [rule] if isinstance(rule, Placement) else list(rule)
    if placements and all(isinstance(placement, Placement) for placement in placements):
        return _of_placements(placements, names, what, ndim)
    used = [axis for entry in placements for axis in (entry if isinstance(entry, (tuple, list)) else [entry])]
    if strange := [axis for axis in used if axis is not None and axis not in names]:
        raise ValueError(f"compile_for_tpu: {what} names {strange[0]!r}, which is no axis of the mesh {names}")
    return PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in placements))


def _of_placements(placements: Sequence[Placement], names: tuple[str, ...], what: str, ndim: int) -> PartitionSpec:
    if len(placements) != len(names):
        raise ValueError(f"compile_for_tpu: {what} has {len(placements)} placements for the axes {names}: give one for each")
    cuts = cuts_of(placements, ndim)
    if isinstance(cuts, str):
        raise ValueError(f"compile_for_tpu: {what} has a value {cuts}")
    return partition_spec(cuts, names)


def _divides(spec: PartitionSpec, shape: tuple[int, ...], axes: Mapping[str, int]) -> str | None:
    """Why a shape cannot be split so, if it cannot."""
    if len(spec) > len(shape):
        return f"it has {len(shape)} dimensions"
    for d, entry in enumerate(spec):
        parts = math.prod(axes[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ()))
        if shape[d] % parts:
            return f"dimension {d} does not divide by {parts}"
    return None
