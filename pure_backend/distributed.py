"""Programs over several processes: DTensors of a `DeviceMesh` as the arguments of one program on the devices of all ranks.

Example:
    >>> torch.distributed.init_process_group("gloo")
    >>> pure_backend.distributed.initialize()
    >>> mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> pure_backend.distributed.shard(model, mesh, {"*.weight": Shard(0)})
    >>> step = pure_backend.TrainStep(model, torch.optim.AdamW(model.parameters()), loss_fn, batch=Shard(0))
"""

from __future__ import annotations

import fnmatch
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pure_backend.ir.layout import connect, connected


def initialize(*, timeout_s: float = 300, heartbeat_s: int = 100) -> None:
    """Let the JAX of each rank of torch's process group see the devices of all ranks.

    To be called by all ranks, after `torch.distributed.init_process_group` and before anything uses JAX. A second call changes
    nothing.

    Args:
        timeout_s: How long a rank waits for the others, here and before each new program.
        heartbeat_s: After how many seconds without a sign of life a rank counts as dead.

    Raises:
        RuntimeError: There is no process group, or JAX was used before.
    """
    if connected():
        return
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("pure_backend.distributed.initialize: call torch.distributed.init_process_group first")
    import jax
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "pure_backend.distributed.initialize: JAX has been used already: call it at the start of the program"
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    address = [_free_address()] if rank == 0 else [None]
    dist.broadcast_object_list(address, 0)
    jax.distributed.initialize(
        address[0], world, rank, initialization_timeout=int(timeout_s), heartbeat_timeout_seconds=heartbeat_s
    )
    connect(world, timeout_s)


def _free_address() -> str:
    """An address of this host that other ranks reach."""
    import os

    host = os.environ.get("MASTER_ADDR") or "localhost"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def shard(model: nn.Module, mesh: Any, rules: Mapping[str, Any]) -> nn.Module:
    """Make the parameters and buffers of a model DTensors, in place.

    Args:
        model: The model; every rank has the same values.
        mesh: The DeviceMesh.
        rules: By pattern of a name (`"*.up.weight"`) its placement, or a placement for each axis of the mesh. The first that
            matches counts; what none matches is replicated.

    Returns:
        The model.

    Raises:
        ValueError: A rule that no parameter matches, or that does not have a placement for each axis.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.placement_types import Placement

    own = {name: [rule] if isinstance(rule, Placement) else list(rule) for name, rule in rules.items()}
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    for pattern, placements in own.items():
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"shard: rule {pattern!r} matches no parameter; there are {names[:6]}, ...")
        if len(placements) != mesh.ndim:
            raise ValueError(f"shard: rule {pattern!r} has {len(placements)} placements, the mesh has {mesh.ndim} axes")

    def placed(name: str) -> Sequence[Any]:
        return next((p for pattern, p in own.items() if fnmatch.fnmatchcase(name, pattern)), [Replicate()] * mesh.ndim)

    made: dict[int, nn.Parameter] = {}  # a shared parameter stays shared
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not isinstance(parameter, DTensor):
                if id(parameter) not in made:
                    value = distribute_tensor(parameter.detach(), mesh, placed(prefix + name))
                    made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not isinstance(buffer, DTensor):
                module._buffers[name] = distribute_tensor(buffer, mesh, placed(prefix + name))
    return model
