"""A program's executables: those stored on disk before, and new ones, which are lowered, compiled and stored."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pure_backend import counters
from pure_backend.jax_bridge.disk_cache import disk_cache
from pure_backend.jax_bridge.runtimes import Runtime
from pure_backend.jax_bridge.vjp import Residual

_logger = logging.getLogger("pure_backend.cache")


@dataclasses.dataclass(frozen=True)
class Call:
    """An executable with the inputs it reads."""

    run: Callable[[Sequence[Any]], Sequence[Any]]
    kept: tuple[int, ...]

    def __call__(self, handles: Sequence[Any]) -> Sequence[Any]:
        counters.count("calls")
        return self.run([handles[i] for i in self.kept])


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward from the disk, and what is known of its program without its jaxpr.

    Attributes:
        call: The executable.
        uses_key: Whether the program reads the random key.
        residuals: Where the backward finds its residuals.
        order: See `Derivative.order`.
    """

    call: Call
    uses_key: bool
    residuals: tuple[Residual, ...]
    order: str

    @classmethod
    def of(cls, call: Call, stored: Mapping[str, Any]) -> Forward:
        """A forward from what `forward_metadata` made."""
        residuals = tuple(Residual(given, fresh) for given, fresh in stored["residuals"])
        return cls(call, stored["uses_key"], residuals, stored["order"])


def forward_metadata(uses_key: bool, residuals: Sequence[Residual], order: str) -> dict[str, Any]:
    """What is stored with a forward, see `Forward`."""
    return {"uses_key": uses_key, "residuals": [(r.input, r.fresh) for r in residuals], "order": order}


class Executables:
    """The executables of one program, by role: its forward, and a backward for each set of cotangents.

    Args:
        runtime: What they run in.
        text: What the program and its executables depend on; None for a program that is not stored.
    """

    def __init__(self, runtime: Runtime, text: str | None = None) -> None:
        self.runtime = runtime
        self.cache = None if text is None else disk_cache()
        self.text = text

    @functools.cached_property
    def forward(self) -> Forward | None:
        """The forward that another process stored."""
        found = self.load("forward")
        return found and Forward.of(*found)

    def load(self, role: str) -> tuple[Call, Mapping[str, Any]] | None:
        """An executable that was stored, and what was stored with it."""
        if self.cache is None:
            return None
        with counters.timed("cache", f"look for the {role} on disk"):
            entry = self.cache.get(self._key(role))
            if entry is None:
                return None
            try:
                outputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in entry.metadata["outputs"]]
                run = self.runtime.load(entry.content, outputs)
            except RuntimeError as error:
                _logger.warning("dropped an entry of the disk cache that cannot be loaded here: %s", error)
                self.cache.drop(self._key(role))
                return None
        counters.count("disk_hits")
        _logger.info("found the %s on disk", role)
        return Call(run, tuple(entry.metadata["kept"])), entry.metadata

    def make(self, role: str, jaxpr: Any, metadata: Mapping[str, Any]) -> Call:
        """A new executable, stored with what is to be known of it."""
        with self.runtime.placement():
            lowered = self.runtime.lower(jaxpr, role)
            executable = self.runtime.compile(lowered)
        if self.cache is not None:
            with counters.timed("cache", f"store the {role} on disk"):
                content = executable.serialize()
                if content is None:
                    _logger.info("not stored on disk: the %s calls functions of this process", role)
                else:
                    outputs = [(output.shape, output.dtype.name) for output in lowered.outputs]
                    self.cache.put(self._key(role), {"kept": lowered.kept, "outputs": outputs, **metadata}, content)
        return Call(executable.run, lowered.kept)

    def _key(self, role: str) -> str:
        return f"{role}\n{self.text}"
