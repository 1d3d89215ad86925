"""Why a node cannot be part of a compiled program, as data."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from torch import fx

from pure_backend.ir.describe import source_line, target_name
from pure_backend.ir.facts import origin

ADVICE = {
    "host read": "use masks (torch.where) or fixed sizes (one_hot(num_classes=...)), or read the value outside of the model",
    "no lowering": "add a lowering (CONTRIBUTING.md), or write it with operators that have one",
    "layout": "convert the tensor first (.to_dense(), .dequantize()), or keep it outside of the compiled function",
    "side effect": "move the effect outside of the compiled function",
    "collective": "keep communication outside of the compiled function, or shard with mark_sharding",
    "distributed": "give it DTensors of one mesh in equal parts, and call pure_backend.distributed.initialize()",
    "custom op": "give the operator a JAX implementation (pure_backend.jax_op)",
    "fault": "please report it; once the error is fixed the node runs in the program",
    "raises": "if eager raises too, fix the call; else please report it",
    "suspected": "eager decides; if it does not raise, the node is compiled",
    "opt-out": "drop pure_backend.impure(...) from the function",
}
"""The kinds of impurity, and what a user can do about each."""


@dataclasses.dataclass(frozen=True)
class Impurity:
    """The reason why one node runs in eager.

    Attributes:
        kind: One of `ADVICE`.
        node: The node's name in the normalized graph; empty if it is the graph as a whole.
        op: Its operator, in words.
        detail: What was seen.
        file: The user's file, or an empty string.
        line: The line in it, or 0.
    """

    kind: str
    node: str
    op: str
    detail: str
    file: str = ""
    line: int = 0

    @classmethod
    def of(cls, node: fx.Node, kind: str, detail: str) -> Impurity:
        """The impurity of a node, with the user's line that the node came from."""
        found = re.match(r'File "(.*)", line (\d+)', source_line(node))
        file, line = (found[1], int(found[2])) if found else ("", 0)
        return cls(kind, origin(node), target_name(node.target), detail, file, line)

    @property
    def advice(self) -> str:
        """What a user can do about it."""
        return ADVICE[self.kind]

    def __str__(self) -> str:
        at = f" at {self.file}:{self.line}" if self.file else ""
        return f"{self.op} ({self.kind}){at}: {self.detail}"


@dataclasses.dataclass(frozen=True, eq=False)
class Unknown:
    """In the place of a value that fake tensors cannot show: it depends on what a host read will give.

    Attributes:
        unsuitable: If not empty, why no program can take the value (a sparse tensor); whoever reads it is impure.
    """

    unsuitable: str = ""


def unknowns(value: Any) -> list[Unknown]:
    """The unknown values among a node's arguments."""
    if isinstance(value, Unknown):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    return [found for part in value for found in unknowns(part)] if isinstance(value, (tuple, list)) else []
