"""Tensors seen as JAX arrays and back, over DLPack, without a copy.

Law: `to_array(t)` shares memory with `t` when `t` is contiguous and 64-byte aligned (what XLA:CPU asks for), and
`to_tensor(a)` always shares memory with `a`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import NamedTuple

import jax
import torch

from pure_backend import _compat
from pure_backend.jax_bridge.avals import to_jax_dtype, to_torch_dtype

_ALIGNMENT = 64
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class _Entry(NamedTuple):
    ref: weakref.ref
    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    array: jax.Array


class ArrayViews:
    """JAX views of long-lived tensors.

    `from_dlpack` costs 20-100 us a tensor, a look-up here under 1 us: with 900 parameters that is the difference between 3 and
    80 ms a step. A view is used only while the very tensor object it was made for is alive and lies where it lay; an in-place
    update of the tensor shows in its view because the memory is shared.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget every view."""
        with self._lock:
            self._entries.clear()

    def __call__(self, tensor: torch.Tensor) -> jax.Array:
        entry = self._entries.get(id(tensor))
        if (
            entry is not None
            and entry.ref() is tensor  # an id may be reused after its owner died
            and entry.pointer == tensor.data_ptr()
            and entry.shape == tensor.shape
            and entry.stride == tensor.stride()
        ):
            return entry.array
        return self._make(tensor)

    def move(self, tensor: torch.Tensor, array: jax.Array) -> bool:
        """Point a tensor at an array's memory, and make the array its view.

        Returns:
            Whether that was possible: not if anything else refers to the tensor's memory, or the layouts differ.
        """
        entry = self._entries.pop(id(tensor), None)
        ref = entry.ref if entry is not None and entry.ref() is tensor else None
        del entry  # the old view shows the memory too
        if not owns_memory(tensor):
            return False
        value = to_tensor(array)
        if tensor.stride() != value.stride():
            return False
        tensor.data = value
        if ref is None:
            self.keep(tensor, array)
        else:
            self._entries[id(tensor)] = _Entry(ref, value.data_ptr(), tensor.shape, tensor.stride(), array)
        return True

    def keep(self, tensor: torch.Tensor, array: jax.Array) -> None:
        """Make an array that shows a tensor's memory its view."""
        key, entries = id(tensor), self._entries

        def forget(ref: weakref.ref) -> None:
            entry = entries.get(key)
            if entry is not None and entry.ref is ref:
                entries.pop(key, None)

        ref = weakref.ref(tensor, forget)
        with self._lock:
            entries[key] = _Entry(ref, tensor.data_ptr(), tensor.shape, tensor.stride(), array)

    def _make(self, tensor: torch.Tensor) -> jax.Array:
        array, shared = _to_array(tensor)
        if shared:
            self.keep(tensor, array)
        return array


def _to_array(tensor: torch.Tensor) -> tuple[jax.Array, bool]:
    """An array with a tensor's values, and whether it shows the tensor's own memory."""
    source = tensor.detach()
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    source = _row_major(source)
    if source.data_ptr() % _ALIGNMENT:
        source = source.clone()  # XLA would copy too, and warn
    shared = source.data_ptr() == tensor.data_ptr() and source.numel() > 0
    if source.dtype in _FLOAT8:
        return _float8_to_array(source), False
    return jax.dlpack.from_dlpack(source), shared


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with row-major strides; a dimension of size 1 may otherwise have any stride (jax issue 25066)."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    stride, step = [], 1
    for n in reversed(tensor.shape):
        stride.append(step)
        step *= max(n, 1)
    stride.reverse()
    return tensor if tensor.stride() == tuple(stride) else tensor.as_strided(tensor.shape, stride)


def _float8_to_array(tensor: torch.Tensor) -> jax.Array:
    bits = jax.dlpack.from_dlpack(tensor.view(torch.uint8))
    return jax.lax.bitcast_convert_type(bits, to_jax_dtype(tensor.dtype))


def to_tensor(array: jax.Array) -> torch.Tensor:
    """A tensor over an array's memory."""
    try:
        return _compat.tensor_over(array)
    except BufferError:  # jaxlib 0.8 has no float8 in DLPack
        bits = jax.lax.bitcast_convert_type(array, jax.numpy.uint8)
        return torch.from_dlpack(bits).view(to_torch_dtype(array.dtype))


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether nothing but this one tensor object refers to its memory: no view, no array, no saved tensor."""
    return _uses(tensor) == (*_uses_of_a_fresh_tensor(), tensor.nbytes)


def _uses(tensor: torch.Tensor) -> tuple[int, ...]:
    """How often a tensor's memory and the tensor itself are referred to, from C++ and by storage objects; its bytes."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), tensor._use_count(), storage.nbytes()


@functools.cache
def _uses_of_a_fresh_tensor() -> tuple[int, ...]:
    """What torch itself has, which versions differ in."""
    return _uses(torch.empty(1))[:2]
