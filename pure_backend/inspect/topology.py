"""libtpu's ahead-of-time compiler, on a machine that need not have a TPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from pure_backend.errors import DeviceError

# libtpu reads these when it starts. It locks a file against a second process, which is meant for processes that share a TPU;
# it asks the metadata server of a cloud machine what TPU it has, and complains of the answer where there is none.
_WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
_CHANGED_BY_JAX = ("TPU_LIBRARY_PATH",)
_lock = threading.Lock()


def tpu_device(topology: str) -> Any:
    """The first device of a TPU topology, see `tpu_topology`."""
    return tpu_topology(topology).devices[0]


@functools.cache
def tpu_topology(topology: str) -> Any:
    """A TPU topology that is described, not present, with all its devices.

    Args:
        topology: A generation and the extent of a slice, as `"v5e:2x2"`.

    Raises:
        DeviceError: libtpu is not installed.
        ValueError: libtpu knows no such topology.
    """
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise DeviceError("compiling for TPU needs libtpu, which is not installed: pip install 'pure_backend[tpu]'")
    with _lock, _environment():
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=topology)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"libtpu cannot describe topology {topology!r}: name a generation and an extent, such as 'v4:2x2x1', "
                f"'v5e:2x2', 'v5p:2x2x1' or 'v6e:2x2' ({error})"
            ) from error


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Let libtpu start beside other processes and without a TPU; what the user has set stands, and nothing stays changed."""
    names = (*_WITHOUT_TPU, *_CHANGED_BY_JAX)
    before = {name: os.environ.get(name) for name in names}
    try:
        for name, value in _WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
