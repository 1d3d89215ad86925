"""Counters of what the compiler did, so that tests and users count work instead of timing it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

_STAGES = (
    *("normalize", "propagate", "unwrap", "mutation", "repeats", "partition"),
    *("trace", "differentiate", "lower", "compile", "cache"),
)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A frozen snapshot of the counters of this process.

    Attributes:
        traces: Walks of a torch graph that made a JAX program.
        lowerings: JAX programs lowered to HLO. A training signature has two: forward and backward.
        calls: Executable calls, forward and backward.
        cache_hits: Specializations that found an equal program already traced.
        disk_hits: Executables that another process had stored. A training signature has two: forward and backward.
        seconds: Seconds spent in each stage of compilation.
    """

    traces: int
    lowerings: int
    calls: int
    cache_hits: int
    disk_hits: int
    seconds: Mapping[str, float]


class _Counters:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.traces = self.lowerings = self.calls = self.cache_hits = self.disk_hits = 0
        self.seconds = dict.fromkeys(_STAGES, 0.0)


_counters = _Counters()


def count(name: str) -> None:
    """Add one to a counter."""
    with _counters.lock:
        setattr(_counters, name, getattr(_counters, name) + 1)


@contextlib.contextmanager
def timed(name: str, what: str = "") -> Iterator[None]:
    """Add the time spent inside to a stage, and log it.

    Args:
        name: The stage.
        what: What is done, for the log.
    """
    started = time.perf_counter()
    try:
        yield
    finally:
        spent = time.perf_counter() - started
        with _counters.lock:
            _counters.seconds[name] += spent
        logging.getLogger(f"pure_backend.{name}").info("%s%.3f s", what and f"{what}: ", spent)


def statistics() -> Statistics:
    """The counters as they are now."""
    with _counters.lock:
        return Statistics(
            traces=_counters.traces,
            lowerings=_counters.lowerings,
            calls=_counters.calls,
            cache_hits=_counters.cache_hits,
            disk_hits=_counters.disk_hits,
            seconds=MappingProxyType(dict(_counters.seconds)),
        )


def reset_statistics() -> None:
    """Set every counter to zero; caches are left as they are."""
    with _counters.lock:
        _counters.reset()
