"""The ways to call a lowered program.

A runtime turns tensors into what its executables take (`enter`), calls (`compile(...)(handles)`), and turns results into
tensors (`leave`). `JaxRuntime` runs on plain tensors, `XlaRuntime` inlines into torch_xla's lazy graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pure_backend.errors import DeviceError


class Runtime(Protocol):
    """What a program needs of a runtime."""

    platform: str

    def enter(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Handles of tensors."""
        ...

    def compile(self, lowered: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The lowered program as a function of handles."""
        ...

    def leave(self, handle: Any) -> torch.Tensor:
        """The tensor of a handle that nothing else refers to."""
        ...


@functools.cache
def runtime_for(device_type: str) -> Runtime:
    """The runtime for tensors on a device.

    Raises:
        DeviceError: There is none.
    """
    if device_type == "xla":
        from pure_backend.jax_bridge.runtimes.xla import XlaRuntime

        return XlaRuntime()
    if device_type in ("cpu", "cuda"):
        from pure_backend.jax_bridge.runtimes.jax import JaxRuntime

        return JaxRuntime(device_type)
    raise DeviceError(f"no runtime for tensors on {device_type!r}: use cpu, cuda or xla tensors")
