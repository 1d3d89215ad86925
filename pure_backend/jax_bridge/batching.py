"""A program called with the tensors of `torch.vmap`: one program for the whole batch, not one call a member.

torch has two kinds of batched tensors: functorch's, of `torch.vmap`, and older ones, which `is_grads_batched=True` and
`torch.autograd.functional.jacobian(vectorize=True)` make. Both run autograd below them, so what a program does to the tensors
inside is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter
from torch._functorch.vmap import unwrap_batched, wrap_batched

from pure_backend.jax_bridge.program import Program

Call = Callable[[Program, Sequence[torch.Tensor], torch.Tensor], Sequence[torch.Tensor]]
_of_older_vmap = torch._C._functorch.is_legacy_batchedtensor


def is_batching(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a functorch transform is active, or one of the tensors is a batch of the older sort."""
    return torch._C._functorch.maybe_current_level() is not None or any(map(_of_older_vmap, tensors))


def call_batched(call: Call, program: Program, inputs: Sequence[torch.Tensor], key: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of a program where `is_batching`.

    Args:
        call: Calls a program with ordinary tensors.
        program: The program of one member of the batch.
        inputs: Its inputs; those that are no batches are the same for all members.
        key: The random key of all members.

    Raises:
        NotImplementedError: The innermost transform is no `torch.vmap`.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return _in_functorch(call, program, inputs, key)
    if any(map(_of_older_vmap, inputs)):
        return _in_older_vmap(call, program, inputs, key)
    return call(program, inputs, key)


def _in_functorch(call: Call, program: Program, inputs: Sequence[torch.Tensor], key: torch.Tensor) -> Sequence[torch.Tensor]:
    interpreter = retrieve_current_functorch_interpreter()
    if not isinstance(interpreter, VmapInterpreter):
        raise NotImplementedError(_OTHER_TRANSFORM)
    tensors, dims = unwrap_batched(tuple(inputs), interpreter.level())
    with interpreter.lower():
        if all(dim is None for dim in dims):
            return call_batched(call, program, tensors, key)
        results = call_batched(call, program.batched(tuple(dims), interpreter.batch_size()), tensors, key)
    return wrap_batched(tuple(results), (0,) * len(results), interpreter.level())


def _in_older_vmap(call: Call, program: Program, inputs: Sequence[torch.Tensor], key: torch.Tensor) -> Sequence[torch.Tensor]:
    level = _innermost(inputs)
    dims = tuple(0 if _of_older_vmap(tensor) else None for tensor in inputs)
    tensors = [t if d is None else torch._remove_batch_dim(t, level, 1, 0) for t, d in zip(inputs, dims, strict=True)]
    size = next(t.shape[0] for t, dim in zip(tensors, dims, strict=True) if dim is not None)
    return [torch._add_batch_dim(result, 0, level) for result in call(program.batched(dims, size), tensors, key)]


def _innermost(inputs: Sequence[torch.Tensor]) -> int:
    """The highest level of older batches among tensors.

    The level that torch counts belongs to the thread that asked for gradients, and autograd runs a backward on accelerators in
    threads of its own.
    """
    return max(level for level in range(1, _LEVELS) if any(_has_level(t, level) for t in inputs if _of_older_vmap(t)))


_LEVELS = 65  # `kVmapNumLevels` and one


def _has_level(tensor: torch.Tensor, level: int) -> bool:
    """Whether a tensor is a batch of a level; if not, torch makes one of the size that is asked for."""
    return any(torch._remove_batch_dim(tensor, level, size, 0).shape[0] != size for size in (1, 2))


_OTHER_TRANSFORM = (
    "the gradient of a compiled function was asked for inside of a torch.func transform other than torch.vmap (grad, vjp, "
    "jvp): compile the function that applies the transform instead"
)
