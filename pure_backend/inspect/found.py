"""What `explain` found, as data."""

from __future__ import annotations

import dataclasses

from pure_backend.counters import Statistics
from pure_backend.ir.impurity import Impurity


@dataclasses.dataclass(frozen=True)
class Break:
    """A place where Dynamo ended one graph and began another, or left a function to eager.

    Attributes:
        reason: The first line of Dynamo's reason.
        explanation: The rest of it.
        file: The user's file, or an empty string.
        line: The line in it, or 0.
    """

    reason: str
    explanation: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.reason} at {self.file}:{self.line}" if self.file else self.reason


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        name: Its name.
        operator: Its operator, in words; empty for an input of the graph.
        value: Dtype and shape of its value.
        inputs: The names of the nodes whose values it takes.
        scopes: The modules and profiler scopes it is in.
        file: The user's file, or an empty string.
        line: The line in it, or 0.
        partition: The number of the partition that it is in; None where it runs in eager.
        impurity: Why it runs in eager, if it is not for its neighbours.
    """

    name: str
    operator: str
    value: str
    inputs: tuple[str, ...]
    scopes: str = ""
    file: str = ""
    line: int = 0
    partition: int | None = None
    impurity: Impurity | None = None


@dataclasses.dataclass(frozen=True)
class Graph:
    """One graph that Dynamo captured.

    Attributes:
        nodes: Its nodes, inputs first.
        impurities: Why it was cut into partitions; empty if it is one.
        eager: Why all of it runs in eager; empty if it does not.
    """

    nodes: tuple[Node, ...]
    impurities: tuple[Impurity, ...] = ()
    eager: str = ""

    @property
    def operators(self) -> int:
        """How many nodes compute something."""
        return sum(bool(node.operator) for node in self.nodes)


@dataclasses.dataclass(frozen=True)
class Partition:
    """One compiled program.

    Attributes:
        graph: The number of its graph.
        nodes: How many nodes of the graph it holds.
        inputs: How many tensors it takes.
        input_bytes: How large these are.
        outputs: How many tensors it returns to torch.
        output_bytes: How large these are.
        write_backs: How many of these are new values of inputs.
        residuals: How many more the forward keeps for the backward; an input that it needs is kept without a copy.
        residual_bytes: How large these are.
        flops: FLOPs of the forward, as XLA counts them before it optimizes; None where it cannot.
        backward_flops: FLOPs of the backward; None without one.
        platform: What it is compiled for.
    """

    graph: int
    nodes: int
    inputs: int
    input_bytes: int
    outputs: int
    output_bytes: int
    write_backs: int
    residuals: int
    residual_bytes: int
    flops: float | None
    backward_flops: float | None
    platform: str


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What the compiler made of one call of a function.

    Attributes:
        graphs: The graphs that Dynamo captured, in the order in which they were compiled.
        partitions: The compiled programs of all graphs.
        breaks: Where and why Dynamo broke the graph.
        statistics: What the compiler did for this call: its counters, and seconds per stage.
    """

    graphs: tuple[Graph, ...]
    partitions: tuple[Partition, ...]
    breaks: tuple[Break, ...]
    statistics: Statistics

    @property
    def impurities(self) -> tuple[Impurity, ...]:
        """The impure nodes of all graphs, each with what to do about it (`impurity.advice`)."""
        return tuple(impurity for graph in self.graphs for impurity in graph.impurities)

    def summary(self) -> str:
        """One line of counts."""
        counts = (
            (len(self.graphs), "graph"),
            (len(self.partitions), "partition"),
            (len(self.impurities), "impure node"),
            (len(self.breaks), "graph break"),
        )
        return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)
