"""The one place that knows versions, and the one importer of torchax.

torchax is used as a table of JAX functions for ATen operators (`aten_table`); its environment and tensor class are never
entered. Importing it whole changes global state of torch and JAX and fails on newer torch, so the import is fenced here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pure_backend._deferred import defer
from pure_backend.errors import EnvironmentMismatchError

SCAN_TAKES_INTEGERS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
"""Whether torch's `scan` differentiates with integers among carries and results; 2.13 fails ("outs_to_grad length")."""


@functools.cache
def float8_saturates() -> bool:
    """Whether torch casts what is too large for `float8_e4m3fn` to its largest number (seen in 2.13) or to NaN (in 2.9)."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return bool(torch.tensor(1e4).to(torch.float8_e4m3fn).float().isfinite())


def jax():
    """The `jax` module, imported at first compile and not on import of the package."""
    import jax as module

    return module


def keeps_products_by_address(jaxlib: str) -> bool:
    """Whether XLA:CPU of a jaxlib version may multiply by the weights that lay at an address before.

    Up to 0.8.1 XLA's XNNPACK thunks pack the right side of a product once and find it again by its address, so a parameter that
    changes in place keeps its first values. Which products go to XNNPACK is decided by processor and shape, so a trial product
    proves nothing: on some processors a small one is right and a large one is not. The version tells, and costs nothing.
    """
    return tuple(map(int, re.findall(r"\d+", jaxlib)[:3])) < (0, 8, 2)


RIGHT_JAXLIB = "pip install 'jax>=0.8.2,<0.11' 'jaxlib>=0.8.2,<0.11'"
"""The command that replaces a jaxlib that `keeps_products_by_address`."""


def check_cpu_client() -> None:
    """Refuse a jaxlib whose results on CPU depend on more than the values of the inputs.

    XLA's option `xla_cpu_use_xnnpack=False` fixes its products, but not its runs on several devices, and our tests know no such
    version: so it is refused, not fixed.

    Raises:
        EnvironmentMismatchError: The jaxlib that is imported `keeps_products_by_address`.
    """
    import jaxlib

    if keeps_products_by_address(jaxlib.__version__):
        raise EnvironmentMismatchError(
            f"jaxlib {jaxlib.__version__} (jax {jax().__version__}) keeps weights of matrix products by address on CPU, so "
            f"results are wrong after parameters change in place. Run: {RIGHT_JAXLIB}"
        )


def x64() -> contextlib.AbstractContextManager[None]:
    """64-bit types for this thread and scope only.

    Without it an int64 input lowers to an s32 parameter and XLA rejects the call.
    """
    return jax().enable_x64(True)


_torchax_lock = threading.RLock()


@contextlib.contextmanager
def _named_tensor_overloads_exist() -> Iterator[None]:
    """Answer, in this thread, for the named-tensor overloads that torchax 0.0.13 names and torch 2.13 no longer has."""
    packet, thread = torch._ops.OpOverloadPacket, threading.get_ident()

    def lookup(self, name):
        try:
            return original(self, name)
        except AttributeError:
            if threading.get_ident() == thread and ("imname" in name or "names" in name):
                return object()
            raise

    with _torchax_lock:
        original = packet.__getattr__
        packet.__getattr__ = lookup
        try:
            yield
        finally:
            packet.__getattr__ = original


def torchax_version() -> str | None:
    """The version that torchax's own files state; they are not run."""
    spec = importlib.util.find_spec("torchax")
    if spec is None or spec.origin is None:
        return None
    match = re.search(r"""^__version__ = ["'](.+)["']""", Path(spec.origin).read_text(), re.MULTILINE)
    return match and match[1]


@functools.cache
def torchax() -> Any:
    """torchax's operators (`torchax.ops.ops_registry`), without what torchax does to torch and JAX.

    Its root module renames PrivateUse1 to "jax", registers a device, and sets flags of torch, JAX and the environment; its
    decompositions take the place of torch's own. Neither is needed for the table of operators, so both wait for somebody who
    asks for something of theirs: a user's own `import torchax; torchax.default_env()` runs them.

    Raises:
        EnvironmentMismatchError: torchax is missing or fails, or its files are not those of the installed distribution (the
            torch_xla wheel bundles an old copy).
    """
    try:
        expected, found = importlib.metadata.version("torchax"), torchax_version()
    except ImportError as error:
        raise EnvironmentMismatchError(f"torchax is not installed: {_INSTALL_TORCHAX}") from error
    if found != expected:
        raise EnvironmentMismatchError(
            f"torchax's files are version {found} but its distribution is {expected}: torch_xla's wheel "
            f"overwrote them. Run: pip install --force-reinstall --no-deps torchax=={expected}"
        )
    try:
        with _named_tensor_overloads_exist():
            defer("torchax", _named_tensor_overloads_exist)
            importlib.import_module("torchax.ops.jaten")
            importlib.import_module("torchax.ops.jtorch")
            defer("torchax.decompositions", _named_tensor_overloads_exist)
            # A device module that calls itself available lets Dynamo on torch 2.13 ask torch for device interfaces it does not
            # have ("PyTorch is not linked with support for jax devices") in every compile, once a user runs torchax.
            importlib.import_module("torchax.device_module").is_available = lambda: False
            return importlib.import_module("torchax.ops.ops_registry")
    except Exception as error:  # a torchax that does not fit may raise anything
        raise EnvironmentMismatchError(
            f"torchax cannot be imported ({type(error).__name__}: {error}): {_INSTALL_TORCHAX}"
        ) from error


_INSTALL_TORCHAX = "pip install --force-reinstall --no-deps torchax==0.0.13, after torch_xla"


@functools.cache
def aten_table() -> dict[Any, Callable[..., Any]]:
    """torchax's JAX functions, by `OpOverload` or `OpOverloadPacket`; those that need its environment are left out."""
    table = torchax().all_aten_ops
    return {key: op.func for key, op in table.items() if op.is_jax_function and not op.needs_env}


@functools.cache
def torch_xla():
    """The `torch_xla` module, or None where it is not installed."""
    try:
        import torch_xla as module
    except ImportError:
        return None
    return module


def jax_settings() -> tuple[Any, ...]:
    """All of JAX's settings, of this process and thread, that a trace depends on: what `jax.jit` keeps its own traces by.

    Without the names of axes, which are those of a transformation that is under way and no setting.
    """
    return (jax().config.jax_default_prng_impl, *_trace_context()()[:-1])


@functools.cache
def _trace_context() -> Callable[[], tuple[Any, ...]]:
    from jax._src import config

    return config.trace_context


def xla_client() -> Any:
    """jaxlib's bindings of XLA's client."""
    from jax._src.lib import xla_client as module

    return module


@functools.cache
def _silence_precision_warning() -> None:
    """Torch 2.9 warns once per process when its matmul precision is *read*; the advice is for who sets it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.get_float32_matmul_precision()


def float32_matmul_precision() -> str:
    """`torch.get_float32_matmul_precision()`."""
    _silence_precision_warning()
    return torch.get_float32_matmul_precision()
