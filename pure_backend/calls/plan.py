"""A call with a program: what goes in, and where the results go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pure_backend.calls.call_plan import Around, CallPlan
from pure_backend.fx_passes.border import Border
from pure_backend.fx_passes.functional import Alias, Constant, Inputs, Value, WriteBack
from pure_backend.fx_passes.inputs import argument_name
from pure_backend.fx_passes.layouts import MeshBorder
from pure_backend.ir.donors import check_valid, donors, give_away
from pure_backend.ir.facts import facts
from pure_backend.ir.geometry import Placed
from pure_backend.ir.layout import MeshOfRanks
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


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(CallPlan):
    """A call of one program: gather, run, write back, hand out. Nothing is checked here, all was decided by `plan_call`.

    Attributes:
        program: The program.
        inputs: What its inputs are among the arguments.
        names: The user's name of each input.
        device: Where it runs.
        mesh: The mesh of ranks that it runs on, if it does.
        storages: Inputs that are a whole storage: which, how many elements lie before the argument, how many there are.
        moved: Inputs that lie on the CPU and are moved to the device: scalars.
        key: What programs that draw no random numbers are given for a key; None for one that does.
        donated: Inputs whose memory is given away.
        renewed: Inputs that are written, and so are valid after they were given away.
        written_together: Arguments, and the results that are their new values, where nothing but the values matters.
        written_apart: The other write-backs.
        retyped: Results that torch_xla returns in another dtype.
        elsewhere: Results that belong on another device.
        outputs: A leaf for each leaf of the original output.
        out_spec: The pytree of the original output; None if it is a tuple of the leaves.
        grad_after: Whether autograd records after the call.
    """

    program: Program
    inputs: Inputs
    names: tuple[str, ...]
    device: torch.device
    mesh: MeshOfRanks | None
    write_backs: tuple[WriteBack, ...]
    placed: Placed
    storages: tuple[tuple[int, int, int], ...]
    moved: tuple[int, ...]
    key: torch.Tensor | None
    donated: tuple[int, ...]
    renewed: frozenset[int]
    written_together: tuple[tuple[int, ...], tuple[int, ...]]
    written_apart: tuple[WriteBack, ...]
    retyped: dict[int, torch.dtype]
    elsewhere: dict[int, torch.device]
    outputs: tuple[Value | Constant | Alias, ...]
    out_spec: pytree.TreeSpec | None
    grad_after: bool

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        inputs = self.gather(args)
        check_valid(inputs, "a compiled graph", lambda: self.names)
        key = draw_key(self.device, self.mesh) if self.key is None else self.key
        results = list(call_program(self.program, inputs, key))
        for place in self.donated:
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
        return tuple(leaves) if self.out_spec is None else pytree.tree_unflatten(leaves, self.out_spec)

    def programs(self) -> Sequence[Program]:
        """The program."""
        return (self.program,)

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
                before = next(b for i, b, _ in self.storages if i == self.inputs.position[write_back.input])
                target = _storage_of(target, before, value.numel())
            target.copy_(value)

    def gather(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The program's inputs."""
        tensors = self.inputs.gather(args, bool(self.program.inputs))
        for place, before, extent in self.storages:
            tensors[place] = _storage_of(tensors[place], before, extent)
        for place in self.moved:  # CPU scalars beside tensors on an accelerator
            tensors[place] = tensors[place].to(self.device)
        return tensors


class Bordered(Around):
    """A plan of a graph of plain tensors, called with wrapper subclasses, or of DTensors, called with plain ones too."""

    def __init__(self, plan: CallPlan, border: Border | MeshBorder) -> None:
        super().__init__(plan)
        self.border = border

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
    with attributed(functional.gm, prepared.place, remat):
        program = compile_graph(functional.gm, functional.differentiable, prepared.reach, written, prepared.place, remat)
        program.prepare()
    return _plan(prepared, program, given_away if device.type == "xla" else ())


def _plan(prepared: Prepared, program: Program, donated: Sequence[int]) -> Plan:
    functional, inputs, device = prepared.functional, prepared.functional.inputs, prepared.device
    placeholders = functional.gm.graph.find_nodes(op="placeholder", sort=True)
    output = functional.gm.graph.output_node()
    results = [facts(node).value for node in output.args[0]]
    together = [w for w in functional.write_backs if not w.recorded and not w.storage]
    flat = functional.out_spec == pytree.tree_structure(tuple(functional.outputs))
    devices = [_named(result.device) for result in results]
    retyped = {i: r.dtype for i, r in enumerate(results) if device.type == "xla" and r.dtype in _RETYPED_ON_XLA}
    return Plan(
        program=program,
        inputs=inputs,
        names=tuple(map(argument_name, placeholders)),
        device=device,
        mesh=prepared.mesh,
        write_backs=functional.write_backs,
        placed=functional.placed,
        storages=tuple((inputs.position[i], *extent) for i, extent in functional.storage_inputs.items()),
        moved=tuple(i for i, node in enumerate(placeholders) if facts(node).value.device != device),
        key=None if program.uses_key else NO_KEY.to(device),
        donated=tuple(donated),
        renewed=inputs.of(write_back.input for write_back in functional.write_backs),
        written_together=(tuple(w.input for w in together), tuple(w.index for w in together)),
        written_apart=tuple(w for w in functional.write_backs if w.recorded or w.storage),
        retyped=retyped,
        elsewhere={i: place for i, place in enumerate(devices) if place != device},
        outputs=functional.outputs,
        out_spec=None if flat else functional.out_spec,
        grad_after=facts(output).grad,
    )
