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
from pure_backend.ir.layout import MeshOfRanks

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
        calls_jaxlib: Whether programs find the custom calls whose code jaxlib brings along; if not, `compile` refuses them.
    """

    platform: str
    fingerprint: str
    calls_jaxlib: bool

    def clear(self) -> None:
        """Forget what is kept of tensors."""

    def enter(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Handles of tensors."""
        ...

    def placement(self) -> AbstractContextManager[Any]:
        """The scope in which programs for this runtime are lowered."""
        ...

    def lower(self, jaxpr: Any, role: str) -> Any:
        """A closed jaxpr, lowered."""
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

    def deliver(self, handle: Any) -> torch.Tensor:
        """The tensor of a handle, as `leave` gives it, for the user to have: its memory can be resized."""
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


Place = torch.device | MeshOfRanks
"""Where programs run: on a device, or on those of all ranks of a mesh."""

_runtimes: dict[Place, Runtime] = {}


def place_of(place: Place) -> Place:
    """What programs for a place depend on: the place itself, but for `xla`, where torch_xla places a computation."""
    return torch.device("xla") if isinstance(place, torch.device) and place.type == "xla" else place


def runtime_for(device: Place) -> Runtime:
    """The runtime for tensors on a device or mesh, made at its first use.

    Raises:
        DeviceError: There is none.
    """
    place = place_of(device)
    if place not in _runtimes:
        _runtimes[place] = _make(place)
    return _runtimes[place]


def made_runtimes() -> list[Runtime]:
    """The runtimes that are in use."""
    return list(_runtimes.values())


def _make(device: Place) -> Runtime:
    if isinstance(device, MeshOfRanks):
        from pure_backend.jax_bridge.runtimes.mesh import MeshRuntime

        return MeshRuntime(device)
    if device.type == "xla":
        from pure_backend.jax_bridge.runtimes.xla import XlaRuntime

        return XlaRuntime()
    if device.type in ("cpu", "cuda"):
        from pure_backend.jax_bridge.runtimes.jax import JaxRuntime

        return JaxRuntime(device)
    raise DeviceError(f"no runtime for tensors on {device}: use cpu, cuda or xla tensors")
