"""How values lie on a mesh of ranks: constraints for XLA's partitioner; the torch bodies of the operators are the reference."""

from __future__ import annotations

from typing import Any

import jax

from pure_backend.ir.functional_ops import Axes
from pure_backend.ir.layout import Cuts, Layout, MeshOfRanks
from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.mesh import named_sharding


def _sharding(mesh: Axes, cuts: Cuts) -> Any:
    return named_sharding(Layout(MeshOfRanks(*mesh, None), tuple(cuts)))


@lowers("constrain")
def constrain(site: Site, x: jax.Array, mesh: Axes, cuts: Cuts) -> jax.Array:
    """The value, cut so; its gradient too."""
    return jax.lax.with_sharding_constraint(x, _sharding(mesh, cuts))


@lowers("stored")
def stored(site: Site, x: jax.Array, mesh: Axes, cuts: Cuts, used: Cuts) -> jax.Array:
    """A parameter as it is used; its gradient as it is kept. Left to propagation, XLA moves activations instead."""
    kept, wanted = _sharding(mesh, cuts), _sharding(mesh, used)

    @jax.custom_vjp
    def gathered(x):
        return jax.lax.with_sharding_constraint(x, wanted)

    def forward(x):
        return gathered(x), None

    def backward(_, cotangent):
        return (jax.lax.with_sharding_constraint(cotangent, kept),)

    gathered.defvjp(forward, backward)
    return gathered(x)
