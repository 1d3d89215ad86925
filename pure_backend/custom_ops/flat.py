"""JAX functions of flat tensors, run eagerly: traced, differentiated and lowered once per signature, as any program is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import torch

from pure_backend import counters
from pure_backend.errors import DeviceError
from pure_backend.ir.describe import describe_tensor
from pure_backend.ir.exact import exact
from pure_backend.jax_bridge.autograd import call_program
from pure_backend.jax_bridge.avals import is_differentiable, to_aval, to_jax_dtype, to_torch_dtype
from pure_backend.jax_bridge.compile import settings
from pure_backend.jax_bridge.program import Program, depends
from pure_backend.jax_bridge.rng import KEY, NO_KEY
from pure_backend.jax_bridge.runtimes import runtime_for
from pure_backend.jax_bridge.trace import tracing

FlatFunction = Callable[..., Sequence[Any]]
_LIMIT = 128


class FlatCalls:
    """The programs of one operator by signature, the oldest dropped first.

    Args:
        name: The operator's name, for messages.
        function: The JAX function of flat arrays for what is static in a call.
    """

    def __init__(self, name: str, function: Callable[[Any], FlatFunction]) -> None:
        self.name = name
        self.function = function
        self._programs: dict[Hashable, tuple[Program, torch.Tensor]] = {}
        self._lock = threading.RLock()

    def __call__(self, static: Hashable, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results, with gradients if autograd records.

        Raises:
            DeviceError: The tensors lie on two devices.
        """
        grad = torch.is_grad_enabled()
        seen = tuple([(t.shape, t.dtype, t.device, grad and t.requires_grad) for t in tensors])
        key = (exact(static), seen, torch.get_default_dtype(), settings())
        known = self._programs.get(key)
        if known is None:
            known = self._make(key, static, tensors, grad)
        program, no_key = known
        return call_program(program, tensors, no_key)

    def _make(
        self, key: Hashable, static: Hashable, tensors: Sequence[torch.Tensor], grad: bool
    ) -> tuple[Program, torch.Tensor]:
        with self._lock:
            device = self._device(tensors)
            wanted = [i for i, t in enumerate(tensors) if grad and t.requires_grad and is_differentiable(t.dtype)]
            program = make_program(self.function(static), [to_aval(t) for t in tensors], wanted, device)
            self._programs[key] = known = (program, NO_KEY.to(device))
            while len(self._programs) > _LIMIT:
                self._programs.pop(next(iter(self._programs)), None)
            return known

    def _device(self, tensors: Sequence[torch.Tensor]) -> torch.device:
        devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
        if len(devices) > 1:
            shown = ", ".join(f"{describe_tensor(t)} on {t.device}" for t in tensors)
            raise DeviceError(f"{self.name}: the arguments lie on several devices ({shown}): move them to one")
        return devices.pop()


def make_program(function: FlatFunction, avals: Sequence[Any], wanted: Sequence[int], device: torch.device) -> Program:
    """A program of a JAX function of flat arrays, differentiable by some of them."""

    def with_key(arrays, key):
        return tuple(function(*arrays))

    with counters.timed("trace"), tracing():
        counters.count("traces")
        jaxpr = jax.make_jaxpr(with_key)(list(avals), KEY)
    inputs = tuple(wanted)
    outvars = jaxpr.jaxpr.outvars
    reach = [depends(jaxpr, i, inputs) if _is_inexact(v.aval.dtype) else frozenset() for i, v in enumerate(outvars)]
    carries = tuple(map(bool, reach))
    kept = inputs if any(carries) else ()
    return Program(jaxpr, kept, carries, tuple(reach), False, runtime_for(device), "none")


def _is_inexact(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def runs_here(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors hold data that a program can run on now: no fakes, no proxies of a trace, no functorch level."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level() is not None:
        return False
    return all(type(tensor) in _PLAIN for tensor in tensors)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def shapes_of(function: FlatFunction, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Empty tensors in the shapes of a function's results: what its fake implementation returns.

    A symbolic size is specialized: the graph that is being captured holds for this size, another one is captured anew.
    """
    avals = [jax.ShapeDtypeStruct(tuple(map(int, t.shape)), to_jax_dtype(t.dtype)) for t in tensors]
    with tracing():
        results = jax.eval_shape(lambda *arrays: tuple(function(*arrays)), *avals)
    like = tensors[0] if tensors else torch.empty(0)
    return [like.new_empty(result.shape, dtype=to_torch_dtype(result.dtype)) for result in results]
