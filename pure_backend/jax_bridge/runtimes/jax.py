"""Plain tensors: a compiled JAX executable over views of their memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import torch

from pure_backend import _compat, counters
from pure_backend.jax_bridge.arrays import ArrayViews, device_of, to_tensor
from pure_backend.jax_bridge.frames import in_bare_thread
from pure_backend.jax_bridge.lower import Lowered, lower
from pure_backend.jax_bridge.memory import memory_release
from pure_backend.jax_bridge.platform import compile_options
from pure_backend.jax_bridge.resizable import resizable_maker
from pure_backend.jax_bridge.rng import NO_KEY
from pure_backend.jax_bridge.runtimes import Executable, Run
from pure_backend.jax_bridge.serialize import deserialize, function_of, machine, serialize


class JaxRuntime:
    """Runs programs on the tensors of one `cpu` or `cuda` device in JAX.

    Raises:
        EnvironmentMismatchError: See `check_cpu_client`.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu":
            _compat.check_cpu_client()
        self.platform = device.type
        self.place = device
        self.device = device_of(device)
        self.fingerprint = machine(self.device)
        self.calls_jaxlib = True
        self.views = ArrayViews()
        self.make_resizable = resizable_maker(device)
        self.release = memory_release()
        self.clear()

    def enter(self, tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
        """JAX arrays over the tensors' memory."""
        view = self.views
        self.release()  # the memory of the call before
        if self.platform == "cuda":  # a kept view knows nothing of what torch has queued since it was made
            torch.cuda.current_stream(self.place).synchronize()
        with _compat.x64():  # outside of it int64 becomes int32
            return [view(tensor) for tensor in tensors]

    def clear(self) -> None:
        """Forget the views of tensors, but for the one that outlives every model."""
        self.views.clear()
        in_bare_thread(lambda: self.enter([NO_KEY]))

    def placement(self) -> AbstractContextManager[Any]:
        """Programs lowered inside belong to this device, whatever JAX's default device is."""
        return jax.default_device(self.device)

    def lower(self, jaxpr: Any, role: str) -> Lowered:
        """Lower for this platform."""
        return lower(jaxpr, self.platform, role)

    def compile(self, lowered: Lowered) -> Executable:
        """Compile with XLA."""
        with counters.timed("compile"):
            compiled = in_bare_thread(lambda: lowered.hlo.compile(compile_options(self.platform)))
        run = _waiting(function_of(compiled, self.device, lowered.outputs))
        return Executable(run, lambda: serialize(lowered.hlo, compiled))

    def load(self, serialized: bytes, outputs: Sequence[jax.ShapeDtypeStruct]) -> Run:
        """The function of an executable that another process compiled."""
        return _waiting(in_bare_thread(lambda: deserialize(serialized, self.device, outputs)))

    def leave(self, handle: jax.Array) -> torch.Tensor:
        """A tensor over the array's memory."""
        return to_tensor(handle)

    def deliver(self, handle: jax.Array) -> torch.Tensor:
        """A tensor over the array's memory, which torch may exchange for other memory."""
        tensor = to_tensor(handle)
        self.make_resizable(tensor)
        return tensor

    def movable(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Those whose memory only their view here shows."""
        return self.views.movable(tensors)

    def assign(self, tensors: Sequence[torch.Tensor], handles: Sequence[jax.Array], move: Sequence[bool]) -> int:
        """Point tensors at the arrays' memory, copy where that may not be.

        The arrays stay their tensors' views, so the next call makes none.
        """
        triples = zip(tensors, handles, move, strict=True)
        copied = [(tensor, array) for tensor, array, may in triples if not (may and self.views.move(tensor, array))]
        if copied:
            with torch.no_grad():
                torch._foreach_copy_([tensor for tensor, _ in copied], [to_tensor(array) for _, array in copied])
        return sum(tensor.nbytes for tensor, _ in copied)


def _waiting(execute: Run) -> Run:
    """A call that returns when its results are there: torch may write to an argument right afterwards."""

    def call(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        with _compat.x64():
            results = execute(arrays)
        if results:
            results[0].block_until_ready()  # the results of one executable are ready together
        return results

    return call
