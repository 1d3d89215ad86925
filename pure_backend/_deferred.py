"""Modules whose code runs when something of theirs is asked for, so that their submodules can be imported without it."""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import sys
import types
from collections.abc import Callable

Scope = Callable[[], contextlib.AbstractContextManager[None]]


class DeferredModule(types.ModuleType):
    """A module that is imported but has not run yet; afterwards it is an ordinary one.

    Only a name that its code binds makes it run: Python and its tools ask all modules for `__warningregistry__` and the
    like, and an import of a submodule by name asks for it here first.
    """

    _scope: Scope | None = None
    _running = False

    def __getattr__(self, name: str) -> object:
        if self._scope is not None and name in _bound(self.__loader__.get_code(self.__name__)):
            with self._scope():
                self._run()
        return types.ModuleType.__getattribute__(self, name)

    def _run(self) -> None:
        if self._running or type(self) is types.ModuleType:  # its own code asks, or another thread was quicker
            return
        self._running = True
        try:
            self.__loader__.exec_module(self)
            self.__class__ = types.ModuleType
        finally:
            del self._running


def _bound(code: types.CodeType) -> set[str]:
    """The names that a module's code binds."""
    return {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "STORE_NAME"}


def defer(name: str, scope: Scope) -> types.ModuleType:
    """Import a module without running it, unless it has run already. To be called in such a scope.

    Args:
        name: Its full name; its parent is imported.
        scope: Entered while it runs, by one thread at a time.

    Raises:
        ModuleNotFoundError: There is none.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = importlib.util.module_from_spec(spec)
    module.__class__ = DeferredModule
    module._scope = scope
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
    return sys.modules.setdefault(name, module)
