"""A DeviceMesh as a JAX mesh and placements as partition specs.

Law: `cuts_of_spec(partition_spec(cuts, names), names) == cuts`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pure_backend.errors import DeviceError
from pure_backend.ir.layout import Cuts, Layout, MeshOfRanks


def partition_spec(cuts: Cuts, names: Sequence[str]) -> PartitionSpec:
    """Placements as a partition spec; of several axes that cut one dimension the first one cuts first, as DTensor does.

    Example:
        >>> partition_spec((0, 0), ("dp", "tp"))
        PartitionSpec(('dp', 'tp'),)
    """
    last = max((cut for cut in cuts if cut is not None), default=-1)
    entries = [tuple(name for name, cut in zip(names, cuts, strict=True) if cut == dim) for dim in range(last + 1)]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def cuts_of_spec(spec: PartitionSpec, names: Sequence[str]) -> Cuts:
    """A partition spec as placements.

    Raises:
        ValueError: Its axes cut a dimension in another order than those of the mesh, which no placements say.
    """
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    cut = {name: dim for dim, entry in enumerate(entries) for name in entry}
    if any(list(entry) != sorted(entry, key=list(names).index) for entry in entries):
        raise ValueError(f"{spec} cuts a dimension by axes that are not in the order of the mesh {tuple(names)}")
    return tuple(cut.get(name) for name in names)


@functools.lru_cache(64)
def jax_mesh(mesh: MeshOfRanks) -> Mesh:
    """The JAX mesh of the ranks' devices: of each process the first one of its kind.

    Raises:
        DeviceError: JAX does not see a process for each rank.
    """
    first: dict[int, Any] = {}
    for device in jax.devices(mesh.device_type):
        first.setdefault(device.process_index, device)
    if missing := sorted(set(mesh.ranks) - set(first)):
        raise DeviceError(f"JAX sees no {mesh.device_type} device of ranks {missing}, but only of {sorted(first)}")
    devices = np.array([first[rank] for rank in mesh.ranks], dtype=object)
    return Mesh(devices.reshape(mesh.shape), mesh.names)


@functools.lru_cache(4096)
def named_sharding(layout: Layout) -> NamedSharding:
    """A layout as JAX says it."""
    return NamedSharding(jax_mesh(layout.mesh), partition_spec(layout.cuts, layout.mesh.names))


def constrained(value: jax.Array, layout: Layout | None) -> jax.Array:
    """A value in a program that lies so, or as XLA likes."""
    return value if layout is None else jax.lax.with_sharding_constraint(value, named_sharding(layout))


def layout_of_sharding(sharding: Any, mesh: MeshOfRanks) -> Layout:
    """How an array lies that a program gave.

    Raises:
        ValueError: No placements say it.
    """
    if sharding.is_fully_replicated:
        return Layout(mesh, (None,) * len(mesh.shape))
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"no placements say how {sharding} lies")
    return Layout(mesh, cuts_of_spec(sharding.spec, mesh.names))
