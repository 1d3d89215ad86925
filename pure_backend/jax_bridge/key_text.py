"""A program's key as text that means the same in every process, for the disk cache."""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.metadata
import logging
import platform
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pure_backend.ir.canonical import foreign
from pure_backend.ir.describe import target_name
from pure_backend.ir.facts import facts
from pure_backend.jax_bridge.lowerings.registry import content_of
from pure_backend.jax_bridge.runtimes import Runtime

_logger = logging.getLogger("pure_backend.cache")

_PACKAGES = ("torch", "torch_xla", "torchax", "jax", "jaxlib", "libtpu", "numpy", "scipy")


def key_text(key: Any, gm: fx.GraphModule, runtime: Runtime) -> str | None:
    """All that a program and its executables depend on.

    Args:
        key: The program's key in memory.
        gm: Its graph.
        runtime: What its executables run in.

    Returns:
        None if there is something in the graph that no text tells; the log says what.
    """
    try:
        lines = [_versions(), _sources(), runtime.fingerprint, _text(key)]
        contents = [_content(node, target, runtime.platform) for node, target in foreign(gm)]
    except _NoTextError as error:
        _logger.info("not stored on disk: %s", error)
        return None
    return "\n".join([*lines, *contents])


class _NoTextError(Exception):
    """Something in a key is an object of this process."""


def _content(node: fx.Node, target: Any, platform: str) -> str:
    content = content_of(target)
    if content is None:
        raise _NoTextError(f"the graph calls {target_name(target)}, whose code another process may find changed")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: facts(n).value)
    return content(platform, *args, **kwargs)


@functools.cache
def _versions() -> str:
    lines = [f"python {platform.python_version()}", f"torch's commit {torch.version.git_version}"]
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    return "\n".join(lines)


@functools.cache
def _sources() -> str:
    """The hash of this package's own files."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return f"pure_backend {digest.hexdigest()}"


def _text(value: Any) -> str:
    """A value as all processes spell it: sets in order."""
    if isinstance(value, frozenset):
        return "{" + ", ".join(map(_text, sorted(value))) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ")"
    if value is None or isinstance(value, (str, bool, int, float, torch.dtype, enum.Enum)):
        return repr(value)
    raise _NoTextError(f"the program depends on {value!r}, an object of this process")
