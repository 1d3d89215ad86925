"""A call with a program: what goes in, and where the results go."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pure_backend.fx_passes.border import Border
from pure_backend.fx_passes.functional import Alias, Constant, Value, WriteBack
from pure_backend.fx_passes.inputs import argument_name
from pure_backend.ir.donors import check_valid, donors, give_away
from pure_backend.ir.facts import facts
from pure_backend.ir.modes import save_an_empty_tensor
from pure_backend.jax_bridge.attribution import attributed
from pure_backend.jax_bridge.autograd import call_program
from pure_backend.jax_bridge.compile import compile_graph
from pure_backend.jax_bridge.donation import donate_buffer
from pure_backend.jax_bridge.program import Program
from pure_backend.jax_bridge.rng import NO_KEY, draw_key
from pure_backend.pipeline import Prepared

# torch_xla returns these as the signed type of their width.
_RETYPED_ON_XLA = (torch.uint16, torch.uint32, torch.uint64)


class Plan:
    """All that a call with one signature does: gather, one program, write-backs, outputs. Nothing is checked here."""

    def __init__(self, prepared: Prepared, program: Program, donors: Sequence[int] = ()) -> None:
        functional, device = prepared.functional, prepared.device
        self.program = program
        self.inputs = inputs = functional.inputs
        self.donors = tuple(donors)
        self.renewed = inputs.of(write_back.input for write_back in functional.write_backs)  # valid: they get a new value
        self.storages = tuple((inputs.position[i], *extent) for i, extent in functional.storage_inputs.items())
        self.write_backs = functional.write_backs
        self.placed = functional.placed
        self.before = {i: before for i, (before, _) in functional.storage_inputs.items()}
        plain = [w for w in self.write_backs if not w.recorded and not w.storage]
        self.written_together = tuple(w.input for w in plain), tuple(w.index for w in plain)
        self.written_apart = tuple(w for w in self.write_backs if w.recorded or w.storage)
        self.outputs = functional.outputs
        self.out_spec = functional.out_spec
        self.flat = functional.out_spec == pytree.tree_structure(tuple(functional.outputs))
        self.device = device
        results = functional.gm.graph.output_node().args[0]
        devices = [_named(facts(node).value.device) for node in results]
        placeholders = functional.gm.graph.find_nodes(op="placeholder", sort=True)
        self.names = tuple(map(argument_name, placeholders))
        self.moved = tuple(i for i, node in enumerate(placeholders) if facts(node).value.device != device)
        self.key = None if program.uses_key else NO_KEY.to(device)
        self.grad_after = facts(functional.gm.graph.output_node()).grad
        self.elsewhere = {i: d for i, d in enumerate(devices) if d != device}
        dtypes = [facts(node).value.dtype for node in results]
        self.retyped = {i: t for i, t in enumerate(dtypes) if device.type == "xla" and t in _RETYPED_ON_XLA}

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        inputs = self.gather(args)
        check_valid(inputs, "a compiled graph", lambda: self.names)
        key = draw_key(self.device) if self.key is None else self.key
        results = list(call_program(self.program, inputs, key))
        for place in self.donors:
            if donate_buffer(inputs[place]) and place not in self.renewed:
                give_away(inputs[place])
        if self.write_backs:
            self.write(args, results)
            save_an_empty_tensor()
        for i, dtype in self.retyped.items():
            results[i] = results[i].to(dtype)
        if self.elsewhere:
            results = [r.to(self.elsewhere.get(i, r.device)) for i, r in enumerate(results)]
        leaves = [output_leaf(output, args, results) for output in self.outputs]
        if torch.is_grad_enabled() is not self.grad_after:  # torch.set_grad_enabled(...) as a statement
            torch._C._set_grad_enabled(self.grad_after)
        return tuple(leaves) if self.flat else pytree.tree_unflatten(leaves, self.out_spec)

    def write(self, args: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
        """Write new values into the caller's tensors."""
        inputs, indices = self.written_together
        if inputs:
            with torch.no_grad():  # one call for all: 2 us each instead of 5
                torch._foreach_copy_([args[i] for i in inputs], [results[i] for i in indices])
        for write_back in self.written_apart:
            self.write_apart(write_back, args[write_back.input], results[write_back.index])

    def write_apart(self, write_back: WriteBack, target: torch.Tensor, value: torch.Tensor) -> None:
        """Write one new value where autograd records it, or into a part of a storage."""
        with torch.set_grad_enabled(write_back.recorded):
            if write_back.storage:
                target = _storage_of(target, self.before[write_back.input], value.numel())
            target.copy_(value)

    def gather(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The program's inputs."""
        with torch.set_grad_enabled(bool(self.program.inputs)) if self.inputs.stacks else contextlib.nullcontext():
            tensors = self.inputs.gather(args)
        for place, before, extent in self.storages:
            tensors[place] = _storage_of(tensors[place], before, extent)
        for place in self.moved:  # CPU scalars beside tensors on an accelerator
            tensors[place] = tensors[place].to(self.device)
        return tensors


class Bordered:
    """A plan of a graph of plain tensors, called with wrapper subclasses."""

    def __init__(self, plan: Plan, border: Border) -> None:
        self.plan = plan
        self.border = border

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        return self.border.leave(args, self.plan(self.border.enter(args)))


def output_leaf(output: Value | Constant | Alias, args: Sequence[Any], results: Sequence[Any]) -> Any:
    """A leaf of the original graph's output."""
    if type(output) is Value:
        return results[output.index]
    if type(output) is Constant:
        return output.value
    origin = results[output.of_output] if output.of_input is None else args[output.of_input]
    return output.view(origin)


def _named(device: torch.device) -> torch.device:
    """A device with its number: a graph may say `xla` and mean the present one."""
    return device if device.index is not None or device.type == "cpu" else torch.empty(0, device=device).device


def _storage_of(tensor: torch.Tensor, before: int, extent: int) -> torch.Tensor:
    """`extent` elements of the storage that a tensor lies in, flat, from so many elements before the tensor's first."""
    return tensor.detach().as_strided((extent,), (1,), tensor.storage_offset() - before)


def plan_call(prepared: Prepared, remat: Any) -> Plan:
    """The plan of a prepared graph.

    Args:
        prepared: The graph.
        remat: See `Options.remat`.

    Raises:
        ImpureGraphError: With the nodes that cannot be lowered or differentiated.
    """
    functional, device = prepared.functional, prepared.device
    placeholders = functional.gm.graph.find_nodes(op="placeholder", sort=True)
    given_away = [placeholders.index(node) for node in donors(functional.gm)]
    written = sorted(functional.inputs.of(write_back.input for write_back in functional.write_backs).union(given_away))
    with attributed(functional.gm, device, remat):
        program = compile_graph(functional.gm, functional.differentiable, prepared.reach, written, device, remat)
        program.prepare()
    return Plan(prepared, program, given_away if device.type == "xla" else ())
