"""The Python frames that JAX notes on what it traces: the user's line, and no others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@functools.cache
def _bare_traceback() -> Any:
    """A JAX traceback that shows nothing but a thread's own start."""
    from jax._src.lib import xla_client

    return in_bare_thread(xla_client.Traceback.get_traceback)


def in_bare_thread(function: Callable[[], Any]) -> Any:
    """The result of a function run where no caller's frames are on the stack; see `without_frames`."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@contextlib.contextmanager
def without_frames() -> Iterator[None]:
    """Trace without the Python frames that JAX would note on every equation, for this thread and scope.

    JAX's tracebacks keep the code objects of all frames alive, Dynamo's compiled frame among them, and Dynamo frees a compiled
    graph when its code object dies: a program that held such a traceback would keep itself, and its model's graph, for ever.
    What JAX makes in C++, executables and long-lived arrays, is made `in_bare_thread` for the same reason. (jaxlib's switch for
    tracebacks is one for the process, and jax 0.10 fails in other threads while it is off.)
    """
    from jax._src import source_info_util

    holder = source_info_util._source_info_context
    before = holder.context
    holder.context = before.replace(traceback=_bare_traceback())
    try:
        yield
    finally:
        holder.context = before


@contextlib.contextmanager
def naming_line(frame: tuple[str, int, str] | None) -> Iterator[None]:
    """Let what is traced inside name this file, line and function as its source; nothing changes for None."""
    if frame is None:
        yield
        return
    from jax._src import source_info_util

    holder = source_info_util._source_info_context
    before = holder.context
    holder.context = before.replace(traceback=_traceback_at(*frame))
    try:
        yield
    finally:
        holder.context = before


@functools.lru_cache(maxsize=4096)
def _traceback_at(file: str, line: int, function: str) -> Any:
    """A JAX traceback that shows one line of a file and keeps none of the caller's code alive."""
    from jax._src.lib import xla_client

    code = compile("traceback = get_traceback()", file, "exec")
    code = code.replace(co_firstlineno=line, co_name=function, co_qualname=function)
    scope = {"get_traceback": xla_client.Traceback.get_traceback}
    in_bare_thread(lambda: exec(code, scope))
    return scope["traceback"]
