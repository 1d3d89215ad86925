"""In which stage every node of an impure graph runs: even stages are pure, odd ones run in eager.

Each node runs in the earliest stage of its kind after everything that it depends on: the nodes it reads, the writes to memory
that it reads, the reads and writes of memory that it writes, and, for an impure node, the impure nodes before it. Within a
stage nodes keep their order. One walk over the nodes, whatever their number.

Memory is followed by storage where fake tensors show it. Where they do not, after a host read, all values count as one memory
together with whatever they were made from: an order too many costs a larger eager stage, one too few a wrong result.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from pure_backend.ir.describe import tensor_leaves
from pure_backend.ir.facts import facts
from pure_backend.ir.impurity import Unknown
from pure_backend.ir.wrapper import pieces_of

_UNKNOWN = "unknown"
_NORMS = (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)
_INPLACE = (
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
    operator.imatmul,
)


def schedule(nodes: Iterable[fx.Node], impure: set[fx.Node]) -> dict[fx.Node, int]:
    """The stage of each node.

    Args:
        nodes: Nodes that have facts, in graph order; without placeholders, attributes, mode nodes and the output.
        impure: Those that run in eager.
    """
    stages: dict[fx.Node, int] = {}
    memory = _Memory()
    effects = 0
    for node in nodes:
        reads = {storage for arg in node.all_input_nodes for storage in memory.of(arg)}
        writes = {storage for arg in may_write(node, node in impure) for storage in memory.of(arg)}
        if isinstance(facts(node).value, Unknown):
            memory.join(reads)
        stage = max([memory.after(reads, writes), *(stages.get(arg, 0) for arg in node.all_input_nodes)])
        if node in impure:
            effects = stage = max(stage, effects) | 1
        else:
            stage += stage & 1
        stages[node] = stage
        memory.note(stage, reads, writes)
    return stages


def may_write(node: fx.Node, impure: bool) -> tuple[fx.Node, ...]:
    """The arguments that a node changes in place, or, if it is not known, those that it may."""
    known = facts(node)
    if known.restrided or known.cut:
        return (*known.writes, *known.cut, *(arg for arg, _ in known.restrided))
    tensors = tuple(node.all_input_nodes)
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return known.writes or (tensors if _schema_writes(node.target) else ())
    if not isinstance(known.value, Unknown):
        return known.writes
    if node.op == "call_method":
        inplace = node.target == "__setitem__" or (node.target.endswith("_") and not node.target.endswith("__"))
        return tensors[:1] if inplace else ()
    if "out" in node.kwargs or node.target in _NORMS:
        return tensors
    if node.target in _INPLACE or node.kwargs.get("inplace"):
        return tensors[:1]
    name, module = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", None) or ""
    if name.endswith("_") and not name.endswith("__"):
        return tensors[:1]
    own = module.startswith("torch") or module in ("_operator", "builtins", "math") or not impure
    return () if own else tensors


def _schema_writes(target: Any) -> bool:
    overloads = [target] if isinstance(target, torch._ops.OpOverload) else [getattr(target, o) for o in target.overloads()]
    return any(overload._schema.is_mutable for overload in overloads)


class _Memory:
    """The last stage in which each storage was read and written; joined storages count as one."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}
        self._read: dict[Any, int] = {}
        self._written: dict[Any, int] = {}

    def of(self, node: fx.Node) -> list[Any]:
        """The storages that a node's value lies in."""
        value = facts(node).value
        if isinstance(value, Unknown):
            return [self._find(_UNKNOWN)]
        return [self._find(leaf.untyped_storage()._cdata) for leaf in pieces_of(tensor_leaves(value))]

    def join(self, storages: Iterable[Any]) -> None:
        """From here on these and the unknown memory are one."""
        for storage in storages:
            root, unknown = self._find(storage), self._find(_UNKNOWN)
            if root != unknown:
                self._parent[root] = unknown
                self._read[unknown] = max(self._read.get(unknown, 0), self._read.pop(root, 0))
                self._written[unknown] = max(self._written.get(unknown, 0), self._written.pop(root, 0))

    def after(self, reads: Iterable[Any], writes: Iterable[Any]) -> int:
        """The first stage in which a node may run that reads and writes these."""
        floors = [self._written.get(self._find(storage), 0) for storage in reads]
        for storage in map(self._find, writes):
            floors += [self._written.get(storage, 0), self._read.get(storage, 0)]
        return max(floors, default=0)

    def note(self, stage: int, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """A node ran in this stage."""
        for known, storages in ((self._read, reads), (self._written, writes)):
            for storage in map(self._find, storages):
                known[storage] = max(known.get(storage, 0), stage)

    def _find(self, storage: Any) -> Any:
        while (parent := self._parent.get(storage, storage)) != storage:
            self._parent[storage] = self._parent.get(parent, parent)
            storage = parent
        return storage
