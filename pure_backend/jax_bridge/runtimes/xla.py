"""`xla` tensors: the HLO as one user computation in torch_xla's lazy graph. Nothing runs until torch_xla syncs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from pure_backend import _compat
from pure_backend.errors import DeviceError, UnsupportedOperatorError
from pure_backend.jax_bridge.custom_calls import jaxlibs_custom_calls
from pure_backend.jax_bridge.lower import Lowered, lower
from pure_backend.jax_bridge.runtimes import Executable, Run
from pure_backend.jax_bridge.serialize import custom_calls, names_its_calls

_PLATFORMS = {"CPU": "cpu", "TPU": "tpu", "CUDA": "cuda", "GPU": "cuda"}


class XlaRuntime:
    """Inlines programs into the lazy graph."""

    def __init__(self) -> None:
        module = _compat.torch_xla()
        if module is None:
            raise DeviceError("xla tensors need torch_xla: pip install 'pure_backend[xla]'")
        import torch_xla.core.xla_builder as builder
        import torch_xla.runtime

        self._bindings = module._XLAC
        self._builder = builder
        self.platform = _PLATFORMS.get(torch_xla.runtime.device_type() or "CPU", "cpu")
        self.fingerprint = f"xla {self.platform}"
        self.calls_jaxlib = False

    def enter(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors themselves."""
        return tensors

    def clear(self) -> None:
        """Nothing is kept of tensors."""

    def placement(self) -> contextlib.AbstractContextManager[Any]:
        """torch_xla places the computation, not JAX."""
        return contextlib.nullcontext()

    def lower(self, jaxpr: Any, role: str) -> Lowered:
        """Lower for this platform."""
        return lower(jaxpr, self.platform, role)

    def compile(self, lowered: Lowered) -> Executable:
        """The program as an XlaComputation; torch_xla compiles it with the graph that it is inlined into.

        Raises:
            UnsupportedOperatorError: It calls code in jaxlib, where torch_xla's XLA cannot find it.
        """
        if missing := custom_calls(lowered.hlo) & frozenset(jaxlibs_custom_calls(self.platform)):
            raise UnsupportedOperatorError(f"torch_xla's XLA lacks {', '.join(sorted(missing))}, whose code is in jaxlib")
        proto = lowered.hlo.compiler_ir("hlo").as_serialized_hlo_module_proto()
        return Executable(self.load(proto, lowered.outputs), lambda: proto if names_its_calls(lowered.hlo) else None)

    def load(self, serialized: bytes, outputs: Sequence[Any]) -> Run:
        """The function of a serialized HLO module."""
        computation = self._builder.computation_from_module_proto("pure_backend", serialized)
        call = self._bindings._xla_user_computation

        def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return call("xla::pure_backend", list(tensors), computation)

        return run

    def leave(self, handle: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return handle

    def deliver(self, handle: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return handle

    def movable(self, tensors: Sequence[torch.Tensor]) -> Sequence[bool]:
        """None: their memory is torch_xla's to choose."""
        return [False] * len(tensors)

    def assign(self, tensors: Sequence[torch.Tensor], handles: Sequence[torch.Tensor], move: Sequence[bool]) -> int:
        """Copy; torch_xla aliases what a step copies to an input of the same step, so no byte moves."""
        with torch.no_grad():
            torch._foreach_copy_(list(tensors), list(handles))
        return 0
