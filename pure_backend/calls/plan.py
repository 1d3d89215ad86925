"""A call with a program: what goes in, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pure_backend import _compat
from pure_backend.fx_passes.border import Border
from pure_backend.fx_passes.functional import Alias, Constant, Functional, Value, WriteBack
from pure_backend.fx_passes.inputs import argument_name
from pure_backend.fx_passes.stacks import Source, hoist_stacks
from pure_backend.ir.donors import check_valid, donors, give_away
from pure_backend.ir.facts import facts
from pure_backend.ir.modes import save_an_empty_tensor
from pure_backend.jax_bridge.attribution import attributed
from pure_backend.jax_bridge.autograd import call_program
from pure_backend.jax_bridge.compile import compile_graph
from pure_backend.jax_bridge.program import Program
from pure_backend.jax_bridge.rng import NO_KEY, draw_key
from pure_backend.options import Options

# torch_xla returns these as the signed type of their width.
_RETYPED_ON_XLA = (torch.uint16, torch.uint32, torch.uint64)


class Plan:
    """All that a call with one signature does: gather, one program, write-backs, outputs. Nothing is checked here."""

    def __init__(
        self,
        functional: Functional,
        program: Program,
        positions: Sequence[Source],
        device: torch.device,
        donors: Sequence[int] = (),
    ) -> None:
        self.program = program
        self.donors = tuple(donors)
        written = {write_back.input for write_back in functional.write_backs}
        self.renewed = frozenset(place for place, i in enumerate(positions) if i in written)  # valid: they get a new value
        self.positions = tuple(i if isinstance(i, int) else i[0] for i in positions)
        self.stacks = tuple((place, i) for place, i in enumerate(positions) if not isinstance(i, int))
        self.storages = tuple((positions.index(i), *extent) for i, extent in functional.storage_inputs.items())
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
        inputs = [(n, facts(n).value) for n in functional.gm.graph.find_nodes(op="placeholder", sort=True)]
        tensors = [value for _, value in inputs if isinstance(value, torch.Tensor)]
        self.names = ("the random key", *(argument_name(n) for n, value in inputs if isinstance(value, torch.Tensor)))
        self.moved = tuple(place for place, tensor in enumerate(tensors) if tensor.device != device)
        self.key = None if program.uses_key else NO_KEY.to(device)
        self.grad_after = facts(functional.gm.graph.output_node()).grad
        self.elsewhere = {i: d for i, d in enumerate(devices) if d != device}
        dtypes = [facts(node).value.dtype for node in results]
        self.retyped = {i: t for i, t in enumerate(dtypes) if device.type == "xla" and t in _RETYPED_ON_XLA}

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        inputs = self.gather(args)
        check_valid(inputs, "a compiled graph", lambda: self.names)
        results = list(call_program(self.program, inputs))
        for place in self.donors:
            if _compat.donate_buffer(inputs[place + 1]) and place not in self.renewed:
                give_away(inputs[place + 1])
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
        """The program's inputs: the key, then the tensors."""
        tensors = [args[i] for i in self.positions]
        if self.stacks:
            with torch.set_grad_enabled(bool(self.program.inputs)):
                for place, members in self.stacks:
                    tensors[place] = torch.stack([args[i] for i in members])
        for place, before, extent in self.storages:
            tensors[place] = _storage_of(tensors[place], before, extent)
        for place in self.moved:  # CPU scalars beside tensors on an accelerator
            tensors[place] = tensors[place].to(self.device)
        return [draw_key(self.device) if self.key is None else self.key, *tensors]


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


def plan_call(
    functional: Functional, reach: Callable[[torch.Tensor], frozenset[int]], device: torch.device, options: Options
) -> Plan:
    """The plan of a functional graph.

    Args:
        functional: The graph.
        reach: Which original inputs a result's gradient reaches, see `gradient_reach`.
        device: The device that it runs on.
        options: The user's options.

    Raises:
        ImpureGraphError: With the nodes that cannot be lowered or differentiated.
    """
    placeholders = functional.gm.graph.find_nodes(op="placeholder", sort=True)
    given = [placeholders.index(node) for node in donors(functional.gm)]
    written_back = [write_back.input for write_back in functional.write_backs]
    sources = hoist_stacks(functional.gm, {*given, *written_back, *functional.storage_inputs})
    placeholders = functional.gm.graph.find_nodes(op="placeholder", sort=True)
    positions = [i for i, p in zip(sources, placeholders, strict=True) if isinstance(facts(p).value, torch.Tensor)]
    place = {i: at for at, source in enumerate(positions) for i in ((source,) if isinstance(source, int) else source)}
    results = functional.gm.graph.output_node().args[0]
    reached = [
        frozenset(place[i] for i in reach(facts(node).value)) if carries else frozenset()
        for node, carries in zip(results, functional.differentiable, strict=True)
    ]
    given_away = [place[i] for i in given if i in place]
    written = sorted({place[i] for i in written_back} | set(given_away))
    with attributed(functional.gm, device, options.remat):
        program = compile_graph(functional.gm, functional.differentiable, reached, written, device, options.remat)
        program.prepare()
    return Plan(functional, program, positions, device, given_away if device.type == "xla" else ())
