"""Tensors seen as JAX arrays and back, without a copy.

Law: `to_array(t)` shares memory with `t` when `t` is contiguous and 64-byte aligned (what XLA:CPU asks for), and
`to_tensor(a)` always shares memory with `a`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from pure_backend.errors import DeviceError, UnsupportedOperatorError
from pure_backend.ir.opaque import unentered
from pure_backend.ir.wrapper import dispatches
from pure_backend.jax_bridge.avals import to_jax_dtype, to_torch_dtype
from pure_backend.jax_bridge.memory import array_over, memory_release, tensor_over

_ALIGNMENT = 64


class _Entry(NamedTuple):
    ref: weakref.ref  # to what the view lives as long as, see `_owner`
    pointer: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    array: jax.Array
    uses: int  # how often the array refers to the tensor's memory: not at all if the memory is the array's own
    given: bool  # whether the memory is the array's own, which `move` gave the tensor


class ArrayViews:
    """JAX views of long-lived tensors.

    To make a view costs 5 us, a look-up here under 1 us. A view is used only while what it was made for is alive and the tensor
    lies where it lay; an in-place update of the tensor shows in its view because the memory is shared.

    A view holds on to its tensor's memory, so it is forgotten when the tensor dies. That of a parameter does not, and lives as
    long as the memory: a weak reference to the parameter would keep torch from exchanging it in `module.to()`
    (`torch.__future__.set_swap_module_params_on_conversion`). Whoever asks for a view keeps the tensor until he has read it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._release = memory_release()

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
            and entry.ref() is not None  # an id may be reused after its owner died
            and entry.pointer == tensor.data_ptr()
            and entry.dtype is tensor.dtype
            and entry.shape == tensor.shape
            and entry.stride == tensor.stride()
        ):
            return entry.array
        return self._make(tensor)

    def movable(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Which tensors have memory of their own: nobody but the view that is kept here refers to it.

        Owners that torch counts are seen by their count: tensors, NumPy arrays and DLPack capsules that were taken of a tensor,
        and the storage's own Python object. Memory that came from elsewhere has owners that it does not count, so it has to be
        what torch allocated for a tensor, or an array that `move` gave it.

        To be asked before a program runs: for a moment after it XLA's threads still refer to what it read.
        """
        self._release()
        return [self._alone(tensor) for tensor in tensors]

    def _alone(self, tensor: torch.Tensor) -> bool:
        if _uses(tensor) != _uses_of_owner(tensor, self._uses_of_view(tensor)):
            return False
        return self._gave(tensor) or _allocated_by_torch(tensor)

    def _gave(self, tensor: torch.Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        return entry is not None and entry.given and entry.ref() is not None and entry.pointer == tensor.data_ptr()

    def move(self, tensor: torch.Tensor, array: jax.Array) -> bool:
        """Point a tensor that is `movable` at an array's memory, and make the array its view.

        Returns:
            Whether that was possible: not if the layouts differ.
        """
        value = to_tensor(array)
        if tensor.stride() != value.stride():
            return False
        tensor.data = value
        self.keep(tensor, array, 0, given=True)
        return True

    def keep(self, tensor: torch.Tensor, array: jax.Array, uses: int, given: bool = False) -> None:
        """Make an array that shows a tensor's memory its view; `uses` says how often it refers to that memory."""
        ref = weakref.ref(_owner(tensor), _Forget(id(tensor), self._entries, self._release))
        with self._lock:
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            self._entries[id(tensor)] = _Entry(ref, *place, array, uses, given)

    def _uses_of_view(self, tensor: torch.Tensor) -> int:
        entry = self._entries.get(id(tensor))
        return entry.uses if entry is not None and entry.ref() is not None and entry.pointer == tensor.data_ptr() else 0

    def _make(self, tensor: torch.Tensor) -> jax.Array:
        array, shared = _to_array(tensor)
        if shared:
            self.keep(tensor, array, 0 if _is_parameter(tensor) else 1)
        return array


class _Forget:
    """Forgets a view when its owner has died. All that it needs is its own: globals are gone when the interpreter ends."""

    __slots__ = ("entries", "key", "release")

    def __init__(self, key: int, entries: dict[int, _Entry], release: Callable[[], None]) -> None:
        self.key = key
        self.entries = entries
        self.release = release

    @unentered
    def __call__(self, ref: weakref.ref) -> None:
        entry = self.entries.get(self.key)
        if entry is not None and entry.ref is ref:
            self.entries.pop(self.key, None)
            del entry
            self.release()


def _owner(tensor: torch.Tensor) -> torch.Tensor | torch.UntypedStorage:
    """What a view of a tensor lives as long as."""
    return tensor.untyped_storage() if _is_parameter(tensor) else tensor


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.device.type == "cpu"  # DLPack's arrays hold on to memory


def _to_array(tensor: torch.Tensor) -> tuple[jax.Array, bool]:
    """An array with a tensor's values, and whether it shows the tensor's own memory.

    Raises:
        UnsupportedOperatorError: The tensor is of a subclass that dispatches: its memory is not its value.
    """
    if dispatches(tensor):
        name = type(tensor).__name__
        raise UnsupportedOperatorError(f"a program was given a {name} where it takes a plain tensor: call it on a plain one")
    source = tensor.detach()
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    source = source.contiguous()
    if source.data_ptr() % _ALIGNMENT:
        source = source.clone()  # XLA would copy too
    shared = source.data_ptr() == tensor.data_ptr() and source.numel() > 0
    if source.device.type != "cpu":
        return jax.dlpack.from_dlpack(_row_major(source)), shared
    held = not (shared and _is_parameter(tensor))
    return array_over(_memory_of(source, held), device_of(source.device)), shared


def _memory_of(tensor: torch.Tensor, held: bool) -> np.ndarray:
    """A contiguous tensor's memory, which holds on to the tensor or not.

    It is not `tensor.numpy()`, after which torch refuses to resize the tensor for ever.
    """
    dtype = to_jax_dtype(tensor.dtype)
    if not tensor.numel():
        return np.empty(tensor.shape, dtype)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor if held else None  # type: ignore[attr-defined]  # the NumPy array keeps `memory`, and that the tensor
    return np.frombuffer(memory, dtype).reshape(tensor.shape)


@functools.cache
def device_of(device: torch.device) -> Any:
    """The JAX device of a `cpu` or `cuda` device, among those of this process.

    Raises:
        DeviceError: JAX does not see it.
    """
    seen = jax.local_devices(backend=device.type)  # `jax.devices()[0]` may be another process's
    found = seen[0] if device.type == "cpu" else next((d for d in seen if d.local_hardware_id == device.index), None)
    if found is None:
        raise DeviceError(f"JAX does not see {device}, only {seen}: let both see the same devices (CUDA_VISIBLE_DEVICES)")
    return found


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with row-major strides; a dimension of size 1 may otherwise have any stride (jax issue 25066)."""
    stride, step = [], 1
    for n in reversed(tensor.shape):
        stride.append(step)
        step *= max(n, 1)
    stride.reverse()
    return tensor if tensor.stride() == tuple(stride) else tensor.as_strided(tensor.shape, stride)


def to_tensor(array: jax.Array) -> torch.Tensor:
    """A tensor over an array's memory."""
    try:
        return tensor_over(array)
    except BufferError:  # no float8 in jaxlib's DLPack, up to 0.10.2
        bits = jax.lax.bitcast_convert_type(array, jax.numpy.uint8)
        return torch.from_dlpack(bits).view(to_torch_dtype(array.dtype))


def _allocated_by_torch(tensor: torch.Tensor) -> bool:
    """Whether torch allocated a tensor's memory, for this process: not that of NumPy, DLPack, a file, or shared memory."""
    storage = tensor.untyped_storage()
    return storage.resizable() and not storage.is_shared()


def _uses_of_owner(tensor: torch.Tensor, views: int) -> tuple[int, int, int, int]:
    """What `_uses` is where nothing but one tensor object, and so many views, refers to the tensor's memory."""
    memory, itself, python = _uses_of_a_fresh_tensor()
    return memory + views, itself, python, tensor.nbytes


def _uses(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """How often a tensor's memory and the tensor itself are referred to from C++, and its storage from Python; its bytes."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), tensor._use_count(), sys.getrefcount(storage), storage.nbytes()


@functools.cache
def _uses_of_a_fresh_tensor() -> tuple[int, int, int]:
    """What torch itself has, which versions differ in."""
    return _uses(torch.empty(1))[:3]
