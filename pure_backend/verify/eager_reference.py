"""Eager torch as the reference of `verify`: copies of a call's arguments, and a graph run on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from pure_backend.ir.modes import modes_kept


class Copies:
    """Copies of a call's arguments: those that share memory share it here too, and gradients stay among them.

    Attributes:
        passed: What to call with.
        leaves: For each argument that requires grad, what to differentiate by.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self.leaves: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        with torch.inference_mode(False), torch.no_grad():
            self.passed = [self._copy(i, a) if isinstance(a, torch.Tensor) else a for i, a in enumerate(args)]

    def _copy(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            self.leaves[i] = plain_copy(tensor).requires_grad_()
            with torch.enable_grad():
                return self.leaves[i].clone()  # no leaf, so that a write is recorded as it is for a tensor with a history
        if tensor.device.type == "xla" or tensor.is_conj() or tensor.is_neg():
            return plain_copy(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave torch's generators as they were, so that a verified call draws what any call would."""
    state, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def autocast_moved() -> Iterator[None]:
    """With the caller's autocast of `xla` on the CPU, where eager runs for `xla` tensors."""
    enabled, dtype = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
    with torch.autocast("cpu", dtype=dtype) if enabled else torch.autocast("cpu", enabled=False):
        yield


def run_eagerly(gm: fx.GraphModule, args: Sequence[Any]) -> Any:
    """What a graph returns in eager torch; modes that it changes are put back."""
    with modes_kept():
        return _OffXla(gm).run(*args)


class _OffXla(fx.Interpreter):
    """Runs a graph with the CPU in the place of `xla` devices, and loops and regions as what they stand for."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        return eagerly(target)(*args, **kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return off_xla(args), off_xla(kwargs)


def _scan(body: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()) -> tuple:
    """`torch.ops.higher_order.scan` as a loop; run bare, torch's own gives wrong gradients."""
    carry, rows = list(init), []
    for i in range(xs[0].shape[0]):
        results = body(*carry, *(x[i] for x in xs), *more)
        carry = list(results[: len(carry)])
        rows.append(results[len(carry) :])
    return (*carry, *(torch.stack(column) for column in zip(*rows, strict=True)))


def _region(body: Callable[..., Any], _: Any, *operands: Any) -> Any:
    """`invoke_subgraph`, which torch runs under its own tracers only."""
    return body(*operands)


def _apply(forward: Callable[..., Any], backward: Callable[..., Any], *operands: Any, **kwargs: Any) -> Any:
    """`autograd_function_apply`: torch's own for what Dynamo made; `unwrap` says less, and that for all versions alike."""
    if set(kwargs) == {"non_differentiable_idx"}:
        return _Applied.apply(forward, backward, kwargs["non_differentiable_idx"], *operands)
    return torch.ops.higher_order.autograd_function_apply(forward, backward, *operands, **kwargs)


class _Applied(torch.autograd.Function):
    """`forward: operands -> (results, saved)`, with `backward: (cotangents, saved) -> gradients` as its gradient."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, fixed: Sequence[int], *operands: torch.Tensor) -> tuple:
        results, saved = forward(*operands)
        ctx.saved, ctx.graph = saved, backward
        ctx.mark_non_differentiable(*(results[i] for i in fixed))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple:
        return (None, None, None, *ctx.graph(*cotangents, *ctx.saved))


_EAGERLY = {"scan": _scan, "invoke_subgraph": _region, "autograd_function_apply": _apply}


def eagerly(target: Any) -> Callable[..., Any]:
    """What to call for a node's target in eager."""
    return _EAGERLY.get(target.name(), target) if isinstance(target, torch._ops.HigherOrderOperator) else target


def off_xla(value: Any) -> Any:
    """Arguments with the CPU in the place of `xla` devices."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(off_xla, value))
    if isinstance(value, dict):
        return {key: off_xla(part) for key, part in value.items()}
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "xla" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "xla" else value


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without history, on the CPU if it is an `xla` tensor."""
    with torch.inference_mode(False):
        tensor = tensor.detach()
        return tensor.cpu() if tensor.device.type == "xla" else tensor.clone()
