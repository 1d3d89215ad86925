"""Which code outside of XLA a program may call: jaxlib's, or a user's of `jax.ffi`."""

from __future__ import annotations

import functools
from collections.abc import Collection

from pure_backend import _compat


def jaxlibs_custom_calls(platform: str) -> Collection[str]:
    """The custom calls whose code jaxlib, or a user of `jax.ffi`, has brought into this process for JAX's own XLA."""
    return _compat.xla_client().custom_call_targets(platform)


@functools.cache
def calling_primitives(platform: str) -> frozenset[str]:
    """The primitives that JAX may lower to a custom call on a platform: those whose lowering there is one of its own."""
    from jax._src.interpreters import mlir

    own = mlir._platform_specific_lowerings.get(platform, {})
    return frozenset({primitive.name for primitive in own} | {"ffi_call", "pure_callback", "io_callback"})


def stable_custom_calls() -> Collection[str]:
    """The custom calls that JAX promises to understand in later processes and versions, as `jax.export` relies on."""
    from jax._src.export._export import _CUSTOM_CALL_TARGETS_GUARANTEED_STABLE as names

    return names
