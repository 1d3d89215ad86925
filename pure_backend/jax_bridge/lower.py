"""jaxpr -> HLO, once, for the platform of the device that will run it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend import core

from pure_backend import counters
from pure_backend.jax_bridge.jaxprs import dce_jaxpr
from pure_backend.jax_bridge.platform import for_platform
from pure_backend.jax_bridge.trace import tracing


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A lowered program.

    Attributes:
        hlo: JAX's own lowered stage: its StableHLO, and what compiles it.
        kept: Positions of the inputs the program reads; the others are not passed.
        outputs: Abstract values of its outputs.
    """

    hlo: Any
    kept: tuple[int, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]


def lower(jaxpr: Any, platform: str, role: str = "program") -> Lowered:
    """Lower a closed jaxpr.

    Args:
        jaxpr: The program; inputs that it does not use are dropped.
        platform: "cpu", "cuda" or "tpu". Lowering by platform makes Pallas kernels Mosaic for TPU from any host.
        role: What it is, for the log.
    """
    used, kept, outputs = used_inputs(jaxpr, platform)
    with counters.timed("lower", f"{role} for {platform}, {len(kept)} inputs, {len(jaxpr.out_avals)} outputs"):
        hlo = to_hlo(used, platform)
    counters.count("lowerings")
    return Lowered(hlo, kept, outputs)


def used_inputs(jaxpr: Any, platform: str) -> tuple[Any, tuple[int, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """A closed jaxpr for a platform with only the inputs it reads; which these are; its outputs' abstract values."""
    used, kept = _used_inputs(for_platform(jaxpr, platform))
    return used, kept, tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals)


def to_hlo(jaxpr: Any, platform: str) -> Any:
    """A closed jaxpr with all its inputs, lowered by JAX; nothing is counted."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.invars]
    with tracing():
        return jitted(jaxpr).trace(*avals).lower(lowering_platforms=(platform,))


def jitted(jaxpr: Any) -> Any:
    """A closed jaxpr with all its inputs, to be traced and lowered for the arguments it is given."""
    function = core.jaxpr_as_fun(jaxpr)

    def program(*args):  # profiles show its name
        return function(*args)

    return jax.jit(program, keep_unused=True)


def _used_inputs(jaxpr: Any) -> tuple[Any, tuple[int, ...]]:
    """The program with only the inputs it reads, but with one at least: torch_xla takes no computation without inputs."""
    pruned, used = dce_jaxpr(jaxpr.jaxpr)
    if not any(used):
        return jaxpr, tuple(range(len(used)))
    kept = tuple(i for i, keep in enumerate(used) if keep)
    return core.ClosedJaxpr(pruned, jaxpr.consts), kept
