"""What one platform needs of a program and of its compiler."""

from __future__ import annotations

from typing import Any

from pure_backend.jax_bridge.fusion import KEEP_BARRIERS, bounded, unbounded
from pure_backend.jax_bridge.jaxprs import rewritten
from pure_backend.jax_bridge.pallas import interpreted


def for_platform(jaxpr: Any, platform: str) -> Any:
    """A closed jaxpr that the platform ("cpu", "cuda", "tpu") can run, and compiles in time."""
    if platform != "cpu":
        return jaxpr
    return rewritten(jaxpr, lambda inner: bounded(interpreted(inner)), lambda inner: unbounded(interpreted(inner)))


def compile_options(platform: str) -> dict[str, Any]:
    """XLA's options for the platform."""
    return dict(KEEP_BARRIERS) if platform == "cpu" else {}
