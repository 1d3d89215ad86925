"""One memory seen from both sides: arrays over NumPy memory, tensors over arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch


@functools.cache
def _jaxlib() -> Any:
    from jax._src.lib import _jax

    return _jax


@functools.cache
def _avals_on(device: Any) -> tuple[Any, Callable[..., Any]]:
    """A device as a sharding, and abstract values of arrays on it, kept."""
    return jax.sharding.SingleDeviceSharding(device), functools.lru_cache(4096)(jax.core.ShapedArray)


def array_over(memory: np.ndarray, device: Any) -> Any:
    """A JAX array over NumPy memory that is 64-byte aligned; it holds on to `memory` until `memory_release()()`.

    `jax.dlpack.from_dlpack` would give XLA a deleter of torch's, which XLA calls on a thread of its own after a program's
    results are there, and which waits for the GIL. If the interpreter ends meanwhile, Python ends that thread and with it the
    process: "terminate called without an active exception", exit status 134. What XLA no longer needs of NumPy, jaxlib only
    puts on a list, which Python threads empty. It also takes 4 us, not 16-100.
    """
    place, aval = _avals_on(device)
    return _jaxlib().batched_device_put(aval(memory.shape, memory.dtype), place, [memory], [device], True)


def memory_release() -> Callable[[], None]:
    """A function that lets go of the memory XLA is done with, in 50 ns if there is none.

    JAX does that too, in calls of its own and in Python's collections.
    """
    return _jaxlib().collect_garbage


def tensor_over(array: Any) -> torch.Tensor:
    """A tensor over the memory of an array on one device.

    On CPU this is what `torch.from_dlpack(array)` ends in, without its questions to the array: 1.5 us instead of 7-12.
    """
    if array.platform() != "cpu":
        return torch.from_dlpack(array)
    return torch._C._from_dlpack(_jaxlib().buffer_to_dlpack_managed_tensor(array, stream=None))
