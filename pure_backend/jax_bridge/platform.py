"""What one platform needs of a program and of its compiler."""

from __future__ import annotations

from typing import Any

from pure_backend.jax_bridge.constants import exact_quotients, exact_sums
from pure_backend.jax_bridge.fusion import KEEP_BARRIERS, bounded, unbounded
from pure_backend.jax_bridge.jaxprs import rewritten
from pure_backend.jax_bridge.pallas import interpreted


def for_platform(jaxpr: Any, platform: str) -> Any:
    """A closed jaxpr that the platform ("cpu", "cuda", "tpu") can run, and compiles in time."""
    if platform != "cpu":
        return jaxpr
    return rewritten(jaxpr, _on_cpu, lambda inner: unbounded(exact_quotients(interpreted(inner))))


def _on_cpu(jaxpr: Any) -> Any:
    """An open jaxpr as XLA:CPU is to have it, outside of small loops."""
    return bounded(exact_sums(exact_quotients(interpreted(jaxpr))))


def compile_options(platform: str) -> dict[str, Any]:
    """XLA's options for the platform: a 16-bit result is rounded to 16 bits, also where the next operator computes in f32."""
    return {"xla_allow_excess_precision": False, **(KEEP_BARRIERS if platform == "cpu" else {})}
