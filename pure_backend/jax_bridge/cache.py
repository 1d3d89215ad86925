"""Programs by content: equal layers and equal models share one, and a program lives as long as something uses it.

The key holds everything the program depends on, compared for equality: the graph's canonical text (targets, constants and
topology; no names, no module paths), the objects in it that no text can name, abstract values, gradient masks and settings.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from pure_backend import counters
from pure_backend.jax_bridge.key_difference import key_difference
from pure_backend.jax_bridge.program import Program

_logger = logging.getLogger("pure_backend.cache")


class ProgramCache:
    """Programs by key, held weakly."""

    def __init__(self) -> None:
        self._programs: weakref.WeakValueDictionary[Any, Program] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, key: Any, make: Callable[[], Program]) -> Program:
        """The program of a key, made if there is none; one thread makes it."""
        with self._lock:
            program = self._programs.get(key)
            if program is not None:
                counters.count("cache_hits")
                _logger.info("found a program in memory")
                return program
            if _logger.isEnabledFor(logging.INFO):
                _logger.info("a new program: %s", key_difference(key, list(self._programs)))
            program = self._programs[key] = make()
            return program

    def clear(self) -> None:
        """Forget every program; those in use go on."""
        with self._lock:
            self._programs.clear()
