"""Torch's gradient of a complex value is the conjugate of JAX's (pytorch issue 41857)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def conjugate(value: jax.Array) -> jax.Array:
    """The conjugate of complex values; real ones as they are."""
    return jnp.conj(value) if jnp.iscomplexobj(value) else value
