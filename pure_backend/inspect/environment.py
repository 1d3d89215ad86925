"""What is installed, which runtimes it offers, and what does not match.

Versions come from metadata and files, never from importing a package: a mixed torchax may not import at all,
and a sound one changes global settings when it does.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pure_backend import _compat

if TYPE_CHECKING:
    from rich.table import Table

REQUIRED = ("torch", "jax", "jaxlib", "torchax")
OPTIONAL = ("torch_xla", "libtpu", "transformers")

Versions = Mapping[str, str | None]


@dataclass(frozen=True)
class Problem:
    """Packages or settings that do not match.

    Attributes:
        what: What is wrong, with the versions seen.
        fix: The shell command that fixes it.
    """

    what: str
    fix: str


@dataclass(frozen=True)
class Environment:
    """What `report_environment` found.

    Attributes:
        versions: Package to version, None where it is not installed; Python is one of the entries.
        runtimes: Runtime (`jax`, `xla`) to the platforms it offers; a runtime that did not start is absent.
        problems: What does not match; empty in a sound environment.
    """

    versions: Versions
    runtimes: Mapping[str, tuple[str, ...]]
    problems: tuple[Problem, ...]

    def __rich__(self) -> Table:
        """A table of versions and runtimes, for `rich.print`."""
        from rich.table import Table

        table = Table("package", "version")
        for name, version in self.versions.items():
            table.add_row(name, version or "not installed")
        table.add_section()
        for name, platforms in self.runtimes.items():
            table.add_row(f"{name} runtime", ", ".join(platforms))
        return table


def report_environment() -> Environment:
    """Report the installed versions, the runtimes that start, and the problems.

    JAX and, where it is installed, torch_xla are imported to see whether they start. torch_xla then chooses a
    `PJRT_DEVICE` if none is set.

    Returns:
        The environment of this process.

    Example:
        >>> for problem in report_environment().problems:
        ...     print(problem.what, problem.fix, sep="\\n")
    """
    versions = {name: _installed_version(name) for name in REQUIRED + OPTIONAL}
    problems = list(find_problems(versions, _compat.torchax_version(), _libtpu_of_jax()))
    runtimes = {}
    for name, (package, platforms) in _RUNTIMES.items():
        version = versions[package]
        if version is None:
            continue
        try:
            runtimes[name] = platforms()
        except Exception as error:  # a broken installation may raise anything; whatever it is, it is reported
            problems.append(_does_not_start(package, version, error))
    return Environment({"python": platform.python_version(), **versions}, runtimes, tuple(problems))


def find_problems(versions: Versions, torchax_files: str | None, libtpu_of_jax: str | None = None) -> Iterator[Problem]:
    """Find what is missing or does not match, from the versions alone.

    Args:
        versions: Every package of `REQUIRED` and `OPTIONAL` to its version, None where it is not installed.
        torchax_files: The version that torchax's own files state, None where they state none.
        libtpu_of_jax: The version of libtpu that the installed jax asks for, None where it does not say.

    Yields:
        One problem for each mismatch.
    """
    for name in REQUIRED:
        if versions[name] is None:
            yield Problem(f"{name} is not installed", f"pip install {name}")
    torch, torch_xla, torchax = versions["torch"], versions["torch_xla"], versions["torchax"]
    if torchax is not None and torchax_files != torchax:
        yield Problem(
            f"torchax's files are version {torchax_files or 'unknown'} but its distribution is {torchax}: "
            "the torch_xla wheel carries an old copy that overwrites them",
            f"pip install --force-reinstall --no-deps torchax=={torchax}",
        )
    if torch is not None and torch_xla is not None and _minor(torch) != _minor(torch_xla):
        yield Problem(
            f"torch {torch} does not fit torch_xla {torch_xla}: they must agree in major and minor version",
            f"pip install 'torch=={_minor(torch_xla)}.*'",
        )
    jaxlib, libtpu = versions["jaxlib"], versions["libtpu"]
    if jaxlib is not None and _compat.keeps_products_by_address(jaxlib):
        yield Problem(
            f"jaxlib {jaxlib} keeps weights of matrix products by address on CPU: results are wrong after they change in place",
            _compat.RIGHT_JAXLIB,
        )
    if libtpu is not None and libtpu_of_jax is not None and _numbers(libtpu) < _numbers(libtpu_of_jax):
        yield Problem(
            f"libtpu {libtpu} is older than the one that jax {versions['jax']} is made for, {libtpu_of_jax}: it may not read "
            "the Mosaic version that jax writes, and then compiles no Pallas kernel",
            f"pip install 'libtpu>={libtpu_of_jax}'",
        )


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libtpu_of_jax() -> str | None:
    try:
        wanted = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [match[1] for line in wanted if (match := re.match(r"libtpu==([\d.]*\d)", line))]
    return found[0] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _jax_platforms() -> tuple[str, ...]:
    from jax.extend import backend

    return tuple(backend.backends())


def _xla_platforms() -> tuple[str, ...]:
    # Only the choice: opening the device would take a TPU away from JAX, or JAX from it.
    import torch_xla.runtime

    return (torch_xla.runtime.device_type() or "none",)


# Runtime to the package that makes it, and the function that starts it.
_RUNTIMES = {"jax": ("jax", _jax_platforms), "xla": ("torch_xla", _xla_platforms)}


def _does_not_start(package: str, version: str, error: Exception) -> Problem:
    what = f"{package} {version} does not start: {type(error).__name__}: {error}"
    platforms = os.environ.get("JAX_PLATFORMS")
    if package == "jax" and platforms and not isinstance(error, ImportError):
        return Problem(f"{what} (JAX_PLATFORMS={platforms})", "unset JAX_PLATFORMS")
    return Problem(what, f"pip install --force-reinstall --no-deps {package}=={version}")
