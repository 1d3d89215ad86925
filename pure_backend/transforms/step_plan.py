"""A training step for one signature of the loss: its program, what goes in, and where the results go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pure_backend.calls.call_plan import CallPlan
from pure_backend.calls.guard import Guard, WrapperGuard, guard_of
from pure_backend.calls.places import overlapping, span
from pure_backend.calls.plan import output_leaf
from pure_backend.calls.signature import signature
from pure_backend.errors import UnsupportedOperatorError
from pure_backend.fx_passes.functional import Alias, Functional, Value
from pure_backend.fx_passes.inputs import argument_name
from pure_backend.ir.donors import check_valid
from pure_backend.ir.exact import exact
from pure_backend.ir.facts import facts
from pure_backend.ir.geometry import Placed
from pure_backend.ir.layout import Layout, is_distributed, layout_of
from pure_backend.jax_bridge.avals import is_differentiable
from pure_backend.jax_bridge.program import Program
from pure_backend.jax_bridge.rng import NO_KEY, draw_key
from pure_backend.jax_bridge.whole_step import Wiring, step_program
from pure_backend.pipeline import Prepared
from pure_backend.transforms.micro_batches import MicroBatches
from pure_backend.transforms.updates import Update, Updates

_LIMIT = 16


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a user chose for all steps, see `TrainStep`."""

    donate: bool
    check_finite: bool
    remat: Any


class StepPlan(CallPlan):
    """Runs the step and returns what the graph of the loss returns.

    Args:
        prepared: The graph of the loss of one micro-batch.
        args: The arguments of the graph.
        trainable: The parameters that count: those of the optimizer, and all of the model's if gradients are clipped.
        updates: The steps of the optimizer.
        batches: Where the batch comes from.
        rules: The user's choices.
        copied: Is told how many bytes of what a step computed were copied.
    """

    def __init__(
        self,
        prepared: Prepared,
        args: Sequence[Any],
        trainable: Sequence[torch.Tensor],
        updates: Updates,
        batches: MicroBatches,
        rules: Rules,
        copied: Callable[[int], None],
    ) -> None:
        self.updates, self.batches, self.rules, self.copied = updates, batches, rules, copied
        self.functional, self.device, self.inputs = prepared.functional, prepared.device, prepared.functional.inputs
        self.place, self.mesh = prepared.place, prepared.mesh
        self.write_backs = self.functional.write_backs
        self.loss = _loss(self.functional)
        reached = [self.inputs.firsts[i] for i in sorted(prepared.reach[self.loss])]
        place = {id(args[i]): i for i in reached if is_differentiable(args[i].dtype)}
        ranks = {i: rank for rank, i in enumerate(dict.fromkeys(map(id, trainable))) if i in place}
        self.trained, self.which = [place[i] for i in ranks], tuple(ranks.values())
        self.batch = tuple(i for i in self.inputs.firsts if batches.knows(args[i]))
        self.split = tuple(self.inputs.position[i] for i in self.batch if batches.whole(args[i]) is not args[i])
        self.placed = self.functional.placed | Placed(frozenset(self.trained))
        _check(self, args)
        self.known: dict[Any, tuple[Program, Wiring]] = {}
        self.latest: tuple[Any, Guard | WrapperGuard, tuple[Program, Wiring]] | None = None
        self.numbers: tuple[Any, torch.Tensor] | None = None
        self.layouts = tuple(_layout(args[i]) for i in self.inputs.firsts)
        self.no_key = NO_KEY.to(self.device)

    def __call__(self, args: Sequence[Any]) -> Any:
        """One step.

        Raises:
            FloatingPointError: Loss or gradients are not finite, and the user wants to know; nothing was updated.
        """
        args, trained, update, program, wiring = self.ready(args)
        tensors = self.tensors(args)
        inputs = [*tensors, self.vector(update.numbers), *update.states]
        check_valid(inputs, "a training step", lambda: self.names(update))
        targets = [*(args[self.inputs.firsts[i]] for i in wiring.new_values), *(update.states[i] for i in wiring.new_states)]
        move = program.runtime.movable(targets) if self.rules.donate else [False] * len(targets)
        handles = list(program.forward(program.runtime.enter([*inputs, self.key(program)])))
        if wiring.check_finite and not bool(program.runtime.leave(handles.pop())):
            raise FloatingPointError("TrainStep: the loss or a gradient is not finite; nothing was updated")
        results: list[Any] = [None] * (max(wiring.returned) + 1)
        for position, handle in zip(wiring.returned, handles, strict=False):
            results[position] = program.runtime.leave(handle)
        self.write(program, wiring, update, targets, move, trained, handles[len(wiring.returned) :])
        leaves = [output_leaf(output, args, results) for output in self.functional.outputs]
        return pytree.tree_unflatten(leaves, self.functional.out_spec)

    def ready(self, args: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor], Update, Program, Wiring]:
        """What a call runs: arguments with the whole batch, trained parameters, update, program, wiring."""
        args = list(args)
        for i in self.batch:
            args[i] = self.batches.whole(args[i])
        trained = [args[i] for i in self.trained]
        update = self.updates.find(trained, self.which)
        return args, trained, update, *self.program(update)

    def write(
        self,
        program: Program,
        wiring: Wiring,
        update: Update,
        targets: Sequence[torch.Tensor],
        move: Sequence[bool],
        trained: Sequence[torch.Tensor],
        handles: list[Any],
    ) -> None:
        """Make the results the contents of parameters, buffers and states; an interrupt waits until that is done."""
        made = [program.runtime.leave(handle) for handle in handles[len(targets) :]]
        new = [update.graph.made[i] for i in wiring.made]
        handles = handles[: len(targets)]
        try:
            self.copied(program.runtime.assign(targets, handles, move))
        except KeyboardInterrupt:
            program.runtime.assign(targets, handles, move)
            raise
        finally:
            entries = {**update.initial, **dict(zip(new, made, strict=True))}
            for entry in sorted(entries, key=lambda entry: entry.parameter):  # in eager's order
                self.updates.optimizer.state[trained[entry.parameter]][entry.name] = entries[entry]
            for parameter in trained:
                if parameter.grad is not None:
                    parameter.grad = None

    def programs(self) -> list[Program]:
        """The programs of the states and settings that the optimizer had so far."""
        return [program for program, _ in self.known.values()]

    def program(self, update: Update) -> tuple[Program, Wiring]:
        """The program for the tensors of an update."""
        if self.latest is not None and self.latest[0] is update.graph and self.latest[1](update.states):
            return self.latest[2]
        key = (update.graph, signature(update.states))
        if key not in self.known:
            while len(self.known) >= _LIMIT:
                self.known.pop(next(iter(self.known)))
            wiring = self.wiring(update)
            loss, step = self.functional.gm, update.graph.functional.gm
            program = step_program(loss, step, update.states, wiring, self.place, self.rules.remat, self.held(update, wiring))
            self.known[key] = (program, wiring)
        found = self.known[key]
        self.latest = (update.graph, guard_of(update.states), found)
        return found

    def held(self, update: Update, wiring: Wiring) -> tuple[Layout | None, ...]:
        """On a mesh, how each new value lies: like the old one."""
        if self.mesh is None:
            return ()
        states = (_layout(update.states[i]) for i in wiring.new_states)
        return (*(self.layouts[i] for i in wiring.new_values), *states)

    def wiring(self, update: Update) -> Wiring:
        """How loss and update meet."""
        place, outputs = self.inputs.position, self.functional.outputs
        computed = {o.index if isinstance(o, Value) else o.of_output for o in outputs if isinstance(o, (Value, Alias))}
        return Wiring(
            loss=self.loss,
            returned=tuple(sorted(i for i in computed if i is not None)),
            written=tuple((place[w.input], w.index) for w in self.write_backs),
            trained=tuple(place[i] for i in self.trained),
            batch=self.split,
            micro_batches=self.batches.count,
            update_inputs=update.graph.inputs,
            update_results=update.graph.results,
            exact=update.graph.exact,
            check_finite=self.rules.check_finite,
        )

    def tensors(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The inputs of the loss; CPU scalars beside tensors on an accelerator are moved there."""
        tensors = self.inputs.gather(args, False)
        return [t if t.device == self.device else t.to(self.device) for t in tensors]

    def names(self, update: Update) -> list[str]:
        """What the inputs of the program are called in messages."""
        placeholders = self.functional.gm.graph.find_nodes(op="placeholder", sort=True)
        return [*map(argument_name, placeholders), "hyper-parameters", *["a state"] * len(update.states)]

    def key(self, program: Program) -> torch.Tensor:
        return draw_key(self.device, self.mesh) if program.uses_key else self.no_key

    def vector(self, numbers: list[float]) -> torch.Tensor:
        """The hyper-parameters as one tensor, made anew only when one of them changed."""
        key = exact(tuple(numbers))  # 0.0 is no -0.0, and a NaN is itself
        if self.numbers is None or self.numbers[0] != key:
            self.numbers = (key, torch.tensor(numbers or [0.0], dtype=torch.float64, device=self.device))
        return self.numbers[1]


def _loss(functional: Functional) -> int:
    """Which result is the loss.

    Raises:
        ValueError: The first output is no loss.
    """
    first = functional.outputs[0] if functional.outputs else None
    results: Any = functional.gm.graph.output_node().args[0]
    value = facts(results[first.index]).value if isinstance(first, Value) else None
    if not isinstance(value, torch.Tensor) or not value.requires_grad or value.ndim or value.is_complex():
        shown = "no tensor that was computed" if value is None else f"a {value.dtype} of shape {tuple(value.shape)}"
        grad = "" if value is None or value.requires_grad else " without gradient"
        raise ValueError(f"TrainStep: the loss must be one real number that depends on the parameters, got {shown}{grad}")
    assert isinstance(first, Value)
    return first.index


def _layout(tensor: Any) -> Layout | None:
    layout = layout_of(tensor) if is_distributed(tensor) else None
    return layout if isinstance(layout, Layout) else None


def _check(plan: StepPlan, args: Sequence[Any]) -> None:
    if not plan.trained:
        raise ValueError("TrainStep: the loss depends on none of the optimizer's parameters")
    written = sorted({*plan.trained, *(write_back.input for write_back in plan.write_backs)})
    if overlapping([args[i] for i in written], frozenset(range(len(written))), span):
        raise UnsupportedOperatorError("TrainStep: parameters or buffers that it writes overlap in memory: step them in eager")
    if plan.functional.storage_inputs or (plan.device.type == "xla" and overlapping(args, plan.functional.placed.shared)):
        raise UnsupportedOperatorError("TrainStep: the loss writes a buffer that shares its memory with another input")
    views = [o for o in plan.functional.outputs if isinstance(o, Alias) and (o.of_input is None or o.of_input in plan.batch)]
    if plan.batches.count > 1 and views:
        raise ValueError("TrainStep: with grad_accumulation no output may be a view of the batch or of another: return a clone")
