"""DTensors: one program on the devices of all ranks of a mesh, each rank's local tensors being its part of the arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import torch

from pure_backend import _compat, counters
from pure_backend.errors import RanksDisagreeError
from pure_backend.ir.layout import Layout, MeshOfRanks, everywhere, is_distributed, layout_of, wrapped
from pure_backend.jax_bridge.agreement import Agreement
from pure_backend.jax_bridge.arrays import ArrayViews, to_tensor
from pure_backend.jax_bridge.lower import Lowered, jitted, used_inputs
from pure_backend.jax_bridge.memory import memory_release
from pure_backend.jax_bridge.mesh import jax_mesh, layout_of_sharding, named_sharding
from pure_backend.jax_bridge.platform import compile_options
from pure_backend.jax_bridge.runtimes import Executable, Run
from pure_backend.jax_bridge.trace import tracing


class MeshRuntime:
    """Runs programs on the DTensors of one mesh.

    A program is lowered when its first arguments are there, since it is lowered for how they lie.

    Raises:
        DeviceError: JAX does not see the devices of all ranks.
    """

    def __init__(self, mesh: MeshOfRanks) -> None:
        jax_mesh(mesh)
        self.mesh = mesh
        self.platform = mesh.device_type
        self.fingerprint = str(mesh)
        self.calls_jaxlib = True
        self.views = ArrayViews()
        self.release = memory_release()
        self.agreement = Agreement(mesh)

    def clear(self) -> None:
        """Forget the views of tensors."""
        self.views.clear()

    def enter(self, tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
        """Global arrays over the memory of local tensors; every rank has the whole of a plain one."""
        self.release()
        with _compat.x64():
            return [self._enter(tensor) for tensor in tensors]

    def _enter(self, tensor: Any) -> jax.Array:
        if not is_distributed(tensor):
            return self._whole(tensor.shape, everywhere(self.mesh), tensor)
        return self._whole(tensor.shape, self._layout(tensor._spec, tensor), tensor._local_tensor)

    def _layout(self, spec: Any, tensor: Any) -> Layout:
        layout = layout_of(tensor)
        if isinstance(layout, str):
            raise ValueError(f"a program over {self.mesh} was given {layout}")
        return layout

    def _whole(self, shape: Sequence[int], layout: Layout, local: torch.Tensor) -> jax.Array:
        return jax.make_array_from_single_device_arrays(tuple(shape), named_sharding(layout), [self.views(local)])

    def placement(self) -> AbstractContextManager[Any]:
        """The arguments say where a program runs."""
        return contextlib.nullcontext()

    def lower(self, jaxpr: Any, role: str) -> Lowered:
        """The program, to be lowered for its first arguments."""
        used, kept, outputs = used_inputs(jaxpr, self.platform)
        return Lowered(jitted(used), kept, outputs)

    def compile(self, lowered: Lowered) -> Executable:
        """The program, to be compiled for its first arguments."""
        return Executable(_Run(self, lowered), lambda: None)

    def load(self, serialized: bytes, outputs: Sequence[Any]) -> Run:
        """Nothing is stored."""
        raise RuntimeError("programs over several processes are not stored")

    def leave(self, handle: jax.Array) -> torch.Tensor:
        """The DTensor over this rank's part of an array."""
        try:
            layout = layout_of_sharding(handle.sharding, self.mesh)
        except ValueError:  # XLA's choice, which no placements say
            layout = everywhere(self.mesh)
            handle = jax.device_put(handle, named_sharding(layout))
        return wrapped(to_tensor(handle.addressable_data(0)), layout, handle.shape)

    deliver = leave

    def movable(self, tensors: Sequence[Any]) -> list[bool]:
        """Those whose local memory only its view here shows."""
        return self.views.movable([_local(tensor) for tensor in tensors])

    def assign(self, tensors: Sequence[Any], handles: Sequence[jax.Array], move: Sequence[bool]) -> int:
        """Point local tensors at this rank's part of arrays, copy where that may not be."""
        locals_ = [_local(tensor) for tensor in tensors]
        triples = zip(locals_, [handle.addressable_data(0) for handle in handles], move, strict=True)
        copied = [(local, part) for local, part, may in triples if not (may and self.views.move(local, part))]
        if copied:
            with torch.no_grad():
                torch._foreach_copy_([local for local, _ in copied], [to_tensor(part) for _, part in copied])
        return sum(local.nbytes for local, _ in copied)


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if is_distributed(tensor) else tensor


class _Run:
    """A program that is lowered and compiled for its first arguments, once all ranks have the same."""

    def __init__(self, runtime: MeshRuntime, lowered: Lowered) -> None:
        self.runtime, self.lowered = runtime, lowered
        self.compiled: Any = None
        self.shardings: list[Any] = []

    def __call__(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        with _compat.x64():
            compiled = self.compile(arrays) if self.compiled is None else self.compiled
            pairs = zip(arrays, self.shardings, strict=True)
            arrays = [array if array.sharding == wanted else jax.device_put(array, wanted) for array, wanted in pairs]
            try:
                results = compiled(*arrays)
                if results:
                    results[0].block_until_ready()  # torch may write to an argument right afterwards
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # XLA raises either
                raise RanksDisagreeError(f"a program over {self.runtime.mesh} failed; did a rank die? {error}") from error
        return results

    def compile(self, arrays: Sequence[jax.Array]) -> Any:
        with counters.timed("lower", f"a program over {self.runtime.mesh}, {len(arrays)} inputs"), tracing():
            lowered = self.lowered.hlo.lower(*arrays)
        counters.count("lowerings")
        self.runtime.agreement.same(lowered.as_text(), arrays)
        with counters.timed("compile"):
            compiled = lowered.compile(compile_options(self.runtime.platform))
        self.runtime.agreement.wait("has not compiled it")  # gloo's own wait inside of a program is 30 s
        self.shardings = [array.sharding for array in arrays]
        self.compiled = compiled
        return compiled
