"""The ways to call a lowered program.

A runtime turns tensors into what its executables take (`enter`), calls (`compile(...)(handles)`), and turns results into
tensors (`leave`). `JaxRuntime` runs on plain tensors, `XlaRuntime` inlines into torch_xla's lazy graph.

What was compiled can be serialized and, in another process, loaded: `load(compile(lowered).serialize(), ...)` computes what
`compile(lowered).run` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from pure_backend.errors import DeviceError

Run = Callable[[Sequence[Any]], Sequence[Any]]
"""A compiled program as a function of handles."""


@dataclasses.dataclass(frozen=True)
class Executable:
    """A compiled program.

    Attributes:
        run: Calls it.
        serialize: Its bytes, for `Runtime.load` where `Runtime.fingerprint` is the same; None if it refers to this process.
    """

    run: Run
    serialize: Callable[[], bytes | None]


class Runtime(Protocol):
    """What a program needs of a runtime.

    Attributes:
        platform: What programs are lowered for: "cpu", "cuda" or "tpu".
        fingerprint: What serialized executables depend on besides versions.
    """

    platform: str
    fingerprint: str

    def clear(self) -> None:
        """Forget what is kept of tensors."""

    def enter(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Handles of tensors."""
        ...

    def placement(self) -> AbstractContextManager[Any]:
        """The scope in which programs for this runtime are lowered."""
        ...

    def compile(self, lowered: Any) -> Executable:
        """The lowered program, compiled."""
        ...

    def load(self, serialized: bytes, outputs: Sequence[Any]) -> Run:
        """A compiled program from its bytes and the abstract values of its outputs.

        Raises:
            RuntimeError: They cannot be loaded here.
        """
        ...

    def leave(self, handle: Any) -> torch.Tensor:
        """The tensor of a handle that nothing else refers to."""
        ...

    def movable(self, tensors: Sequence[torch.Tensor]) -> Sequence[bool]:
        """Which tensors may be given other memory, because they share theirs with nobody; to be asked before a program runs."""
        ...

    def assign(self, tensors: Sequence[torch.Tensor], handles: Sequence[Any], move: Sequence[bool]) -> int:
        """Make the values of handles the contents of tensors.

        Args:
            tensors: Tensors of the handles' shapes and dtypes.
            handles: What nothing else refers to.
            move: For each tensor, whether it may be given the handle's memory.

        Returns:
            How many bytes were copied.
        """
        ...


_runtimes: dict[str, Runtime] = {}


def runtime_for(device_type: str) -> Runtime:
    """The runtime for tensors on a device, made at its first use.

    Raises:
        DeviceError: There is none.
    """
    if device_type not in _runtimes:
        _runtimes[device_type] = _make(device_type)
    return _runtimes[device_type]


def made_runtimes() -> list[Runtime]:
    """The runtimes that are in use."""
    return list(_runtimes.values())


def _make(device_type: str) -> Runtime:
    if device_type == "xla":
        from pure_backend.jax_bridge.runtimes.xla import XlaRuntime

        return XlaRuntime()
    if device_type in ("cpu", "cuda"):
        from pure_backend.jax_bridge.runtimes.jax import JaxRuntime

        return JaxRuntime(device_type)
    raise DeviceError(f"no runtime for tensors on {device_type!r}: use cpu, cuda or xla tensors")
