"""`options={"verify": True}`: the first call of each specialization is compared with eager, down to the node that differs.

Compared are outputs, written inputs and, in the first backward, gradients. Where they differ, the graph is walked: each node is
run in eager on the values that eager has there, and lowered alone on the same values, so the first node that gives something
else is the culprit and not a victim. Random operators draw other numbers than eager's, so a program with random nodes is
checked node by node, and those nodes by shape and dtype alone. Eager runs on the CPU for `xla` tensors: torch_xla's own eager
differs from torch in places.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pure_backend.calls.call_plan import Around
from pure_backend.calls.plan import Plan
from pure_backend.errors import AccuracyError
from pure_backend.fx_passes.functional import Functional, Value
from pure_backend.ir.describe import describe_node, describe_tensor
from pure_backend.ir.modes import no_autocast
from pure_backend.pipeline import Prepared
from pure_backend.verify.culprit import Culprit, first_difference, is_uninitialized
from pure_backend.verify.difference import Bounds, Difference, compare, compare_calls
from pure_backend.verify.eager_reference import Copies, autocast_moved, plain_copy, random_state_kept, run_eagerly
from pure_backend.verify.reproducer import write_reproducer

_logger = logging.getLogger("pure_backend")

_GRAPH = 5


class Verified(Around):
    """A plan whose first call and first backward are compared with eager; later calls are the plan's own."""

    def __init__(self, plan: Plan, prepared: Prepared, verify: bool | str | PathLike[str]) -> None:
        super().__init__(plan)
        self._check: _Check | None = _Check(plan, prepared, None if verify is True else verify)

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs.

        Raises:
            AccuracyError: They are not what eager gives.
        """
        check = self._check
        if check is None:
            return self.plan(args)
        result = check(args)
        self._check = None
        return result


class _Check:
    """The first call of a plan beside eager's."""

    def __init__(self, plan: Plan, prepared: Prepared, folder: Any) -> None:
        self.plan = plan
        self.gm = prepared.source
        self.functional = prepared.functional
        self.folder = folder
        nodes = [node for node in self.functional.gm.graph.nodes if node.op not in ("placeholder", "output")]
        self.comparable = not plan.program.uses_key and not any(map(is_uninitialized, nodes))
        self.gradients = bool(plan.program.inputs) and torch.is_grad_enabled()

    def __call__(self, args: Sequence[Any]) -> Any:
        eager = Copies(args)
        before = Copies(args).passed if self.plan.write_backs else args
        with random_state_kept(), autocast_moved() if self.plan.device.type == "xla" else contextlib.nullcontext():
            want = run_eagerly(self.gm, eager.passed)
            inputs = [plain_copy(tensor) for tensor in self.plan.gather(before)]
        bounds = Bounds.of(self.functional.gm.graph.nodes, inputs, _GRAPH)
        got = self.plan(args)
        found = list(compare_calls(got, want, args, eager.passed, self.plan, bounds, self.comparable))
        if not self.comparable:
            self.blame(found, inputs, self.gradients)
        elif found:
            self.blame(found, inputs, False)
        if self.gradients and self.comparable:
            self.watch_backward(got, args, want, eager, inputs)
        return got

    def blame(self, found: list[Difference], inputs: list[torch.Tensor], gradients: bool) -> None:
        """Raise the error of the first node that differs.

        Raises:
            AccuracyError: There is one, or there is none but the whole differs.
        """
        with random_state_kept():
            culprit = first_difference(self.functional.gm, inputs, gradients)
        if culprit is not None:
            raise self.error_of(culprit, found)
        if found and not all(difference.exact for difference in found):
            raise AccuracyError(
                f"compiled differs from eager: {_listed(found)}\nno node differs on its own: either rounding adds up, or nodes "
                "are put together wrongly (writes, views)"
            )
        for difference in found:
            _logger.warning("compiled differs from eager, but no node does on its own: %s", difference.text)

    def error_of(self, culprit: Culprit, found: list[Difference]) -> AccuracyError:
        """The error that names a node, with its reproducer."""
        node, difference = culprit.node, culprit.difference
        folder = self.folder or tempfile.mkdtemp(prefix="pure_backend_verify_")
        path = write_reproducer(folder, node, culprit.args, culprit.kwargs, difference.text)
        lines = [f"compiled differs from eager: {_listed(found)}"] if found else []
        lines += [f"the first node that differs is {node.name} = {describe_node(node)}", difference.text]
        lines += [f"reproducer: {path}" if path else "no reproducer: the node has graphs or views inside"]
        return AccuracyError("\n".join(lines), node=node.name, error=difference.error, reproducer=path)

    def watch_backward(self, got: Any, args: Sequence[Any], want: Any, eager: Copies, inputs: list[torch.Tensor]) -> None:
        """Compare gradients when the program's node runs backward for the first time."""
        ours = _program_node([*pytree.tree_leaves(got), *args], self.plan.program)
        if ours is None:
            return
        heads = _heads(self.functional, pytree.tree_leaves(want), eager.passed)

        def compare(grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
            given = [(heads.get(i), cotangent) for i, cotangent in enumerate(grad_outputs) if cotangent is not None]
            heads.clear()  # only the first time, and eager's graph is freed
            if given and all(head is not None and head.requires_grad for head, _ in given):
                self.compare_gradients(grad_inputs, given, eager, inputs)

        ours.register_hook(compare)

    def compare_gradients(self, got: Sequence[Any], given: list[tuple[Any, Any]], eager: Copies, inputs: list) -> None:
        places = {position: self.plan.inputs.sources[position] for position in self.plan.program.inputs}
        positions = [position for position, place in places.items() if place in eager.leaves]
        leaves = [eager.leaves[places[position]] for position in positions]
        bounds = Bounds.of(self.functional.gm.graph.nodes, inputs, _GRAPH)
        with torch.enable_grad(), random_state_kept(), no_autocast():
            cotangents = [cotangent.detach().to(head.device) for head, cotangent in given]
            want = torch.autograd.grad([head for head, _ in given], leaves, cotangents, allow_unused=True, retain_graph=True)
        found = []
        for position, grad in zip(positions, want, strict=True):
            what = f"the gradient of input {places[position]}"
            if (grad is None) != (got[position] is None):
                found.append(Difference(what, float("inf"), f"{what} is {_kind(got[position])}, in eager {_kind(grad)}"))
            elif grad is not None and (difference := compare(what, got[position], grad, bounds)):
                found.append(difference)
        if found:
            self.blame(found, inputs, True)


def _kind(value: Any) -> str:
    return "None" if value is None else describe_tensor(value)


def _listed(found: Sequence[Difference]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0].text + more


def _heads(functional: Functional, want: Sequence[Any], args: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Eager's tensors by their position among the program's outputs."""
    outputs = zip(functional.outputs, want, strict=True)
    heads = {output.index: leaf for output, leaf in outputs if type(output) is Value}
    return heads | {write_back.index: args[write_back.input] for write_back in functional.write_backs if write_back.recorded}


def _program_node(tensors: Sequence[Any], program: Any) -> Any:
    """The autograd node of this call of a program: the first on each way up from its results."""
    queue = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop(0)
        if getattr(node, "program", None) is program:
            return node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen and type(node).__name__ != "PureFunctionBackward":
                seen.add(parent)
                queue.append(parent)
    return None
