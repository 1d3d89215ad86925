"""Sharding annotations of torch_xla: identities that tell XLA's partitioner how a value lies on the devices of a mesh.

`jax.lax.with_sharding_constraint` wants a mesh of JAX devices, and the devices here are torch_xla's, which JAX does not see. So
the annotation is a primitive of its own: in HLO it is the custom call that torch_xla makes, `@Sharding` with an op sharding.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import ad, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pure_backend.jax_bridge.lowerings.registry import Site, lowers

_annotate = core.Primitive("sharding_annotation")
_annotate.def_impl(lambda x, *, sharding: x)
_annotate.def_abstract_eval(lambda x, *, sharding: x)
ad.deflinear2(_annotate, lambda cotangent, x, *, sharding: [_annotate.bind(cotangent, sharding=sharding)])


def _custom_call(context: Any, x: Any, *, sharding: str) -> Any:
    call = stablehlo.CustomCallOp([x.type], [x], call_target_name="Sharding")
    call.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
    return call.results


mlir.register_lowering(_annotate, _custom_call)


@lowers("xla::dynamo_mark_sharding")
def mark_sharding(
    site: Site, x: jax.Array, device_ids: Any, mesh_shape: Any, axis_names: str, partition_spec: str
) -> jax.Array:
    """What `torch_xla.distributed.spmd.mark_sharding` annotates; its gradient is annotated in the same way."""
    names = ast.literal_eval(axis_names)
    return _annotate.bind(x, sharding=op_sharding(device_ids, mesh_shape, names, ast.literal_eval(partition_spec)))


@lowers("xla::aot_mark_sharding")
def aot_mark_sharding(site: Site, x: jax.Array, mesh: str, partition_spec: str) -> jax.Array:
    """The operator of `mark_sharding_with_gradients`."""
    known = ast.literal_eval(mesh)
    sharding = op_sharding(known["device_ids"], known["mesh_shape"], known["axis_names"], ast.literal_eval(partition_spec))
    return _annotate.bind(x, sharding=sharding)


def op_sharding(device_ids: Sequence[int], mesh_shape: Sequence[int], names: Sequence[str], spec: Sequence[Any]) -> str:
    """HLO's text of a sharding.

    Args:
        device_ids: The devices of the mesh, in row-major order.
        mesh_shape: How many devices each axis of the mesh has.
        names: The names of the axes.
        spec: For each dimension of the value the axes that it is split over: a name or number, a tuple of them, or None.

    Example:
        >>> op_sharding([0, 1, 2, 3], (2, 2), ("data", "model"), ("model", None))
        '{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}'
    """
    split = [axis if isinstance(axis, (tuple, list)) else () if axis is None else (axis,) for axis in spec]
    split = [[names.index(axis) if isinstance(axis, str) else axis for axis in axes] for axes in split]
    used = [axis for axes in split for axis in axes]
    if not used:
        return "{replicated}"
    rest = [axis for axis in range(len(mesh_shape)) if axis not in used]
    order = np.asarray(device_ids).reshape(mesh_shape).transpose([*used, *rest]).flatten()
    copies = math.prod(mesh_shape[axis] for axis in rest)
    tiles = [math.prod(mesh_shape[axis] for axis in axes) for axes in split] + ([copies] if copies > 1 else [])
    suffix = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, order))}{suffix}}}"
