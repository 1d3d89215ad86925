"""A call of an impure graph: its compiled partitions and the eager nodes between them, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.calls.call_plan import CallPlan
from pure_backend.calls.eager import EagerStage
from pure_backend.fx_passes.partition import Stage, for_arguments
from pure_backend.ir.impurity import Impurity

_logger = logging.getLogger("pure_backend")
Compile = Callable[[fx.GraphModule], Callable[..., Sequence[Any]]]


class PureStage:
    """A compiled partition, specialized by the structure of what eager nodes hand it."""

    def __init__(self, stage: Stage, from_stages: Sequence[int], compile_graph: Compile) -> None:
        self.stage = stage
        self.from_stages = from_stages
        self.compile_graph = compile_graph
        self.compiled: dict[Any, Callable[..., Sequence[Any]]] = {}

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        """What the partition returns."""
        if any(isinstance(args[i], (float, tuple, list, dict)) for i in self.from_stages):
            return self.with_structure(args)
        if None not in self.compiled:
            self.compiled[None] = self.compile_graph(self.stage.gm)
        return self.compiled[None](*args)

    def with_structure(self, args: Sequence[Any]) -> Sequence[Any]:
        """What the partition returns, for arguments that are not all tensors and sizes."""
        leaves, spec = pytree.tree_flatten(list(args))
        floats = tuple(isinstance(leaf, float) for leaf in leaves)
        if (spec, floats) not in self.compiled:
            self.compiled[spec, floats] = self.compile_graph(for_arguments(self.stage, spec, floats))
        leaves = [torch.tensor(a, dtype=torch.float64) if f else a for a, f in zip(leaves, floats, strict=True)]
        return self.compiled[spec, floats](*leaves)


class Staged(CallPlan):
    """A call of a graph with impure nodes: its stages in order."""

    def __init__(
        self,
        gm: fx.GraphModule,
        stages: Sequence[Stage],
        grad_after: bool | None,
        impurities: Sequence[Impurity],
        compile_graph: Compile,
    ) -> None:
        self.impurities = tuple(impurities)
        self.grad_after = grad_after
        slots = {node.name: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder", sort=True))}
        self.arguments = len(slots)
        for name in (name for stage in stages for name in stage.outputs):
            slots[name] = len(slots)
        self.slots = slots
        output = fx.map_arg(gm.graph.output_node().args[0], lambda node: _Slot(slots[node.name]))
        self.leaves, self.out_spec = pytree.tree_flatten(output)
        self.steps = [self._step(stage, compile_graph) for stage in stages]
        self.done = self._last_uses()
        _report(self.impurities, stages)

    def stages(self) -> list[PureStage]:
        """The compiled partitions."""
        return [run for run, _, _ in self.steps if isinstance(run, PureStage)]

    def _step(self, stage: Stage, compile_graph: Compile) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
        inputs = tuple(self.slots[name] for name in stage.inputs)
        from_stages = [i for i, slot in enumerate(inputs) if slot >= self.arguments]
        run = PureStage(stage, from_stages, compile_graph) if stage.pure else EagerStage(stage.gm)
        return run, inputs, tuple(self.slots[name] for name in stage.outputs)

    def _last_uses(self) -> list[tuple[int, ...]]:
        """For each step the values that nobody reads after it; they are let go then."""
        returned = {leaf.index for leaf in self.leaves if isinstance(leaf, _Slot)}
        last = {slot: step for step, (_, inputs, outputs) in enumerate(self.steps) for slot in (*outputs, *inputs)}
        done: list[list[int]] = [[] for _ in self.steps]
        for slot, step in last.items():
            if slot not in returned:
                done[step].append(slot)
        return [tuple(slots) for slots in done]

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        grad = torch.is_grad_enabled()
        values = [*args, *[None] * (len(self.slots) - self.arguments)]
        try:
            for (run, inputs, outputs), done in zip(self.steps, self.done, strict=True):
                results = run([values[i] for i in inputs])
                torch._C._set_grad_enabled(grad)  # every stage opens the modes of its nodes itself
                for slot, result in zip(outputs, results, strict=True):
                    values[slot] = result
                for slot in done:
                    values[slot] = None
        finally:
            torch._C._set_grad_enabled(grad)
        if self.grad_after is not None:
            torch._C._set_grad_enabled(self.grad_after)
        leaves = [values[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.out_spec)


class _Slot:
    """Where a value of the graph is kept during a call."""

    def __init__(self, index: int) -> None:
        self.index = index


def _report(impurities: Sequence[Impurity], stages: Sequence[Stage]) -> None:
    sizes = ", ".join(f"{stage.nodes} {'compiled' if stage.pure else 'in eager'}" for stage in stages)
    listed = "".join(f"\n- {impurity}" for impurity in impurities)
    _logger.warning("a graph has impure nodes and runs in stages of nodes (%s):%s", sizes, listed)
