"""What `explain` found: data, as text, as HLO, and as a page."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pure_backend.counters import Statistics
from pure_backend.ir.impurity import Impurity

if TYPE_CHECKING:
    from rich.table import Table

STAGES = ("jaxpr", "stablehlo", "optimized")
DIRECTIONS = ("forward", "backward")


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


class Report:
    """What the compiler made of one call of a function.

    Attributes:
        graphs: The graphs that Dynamo captured, in the order in which they were compiled.
        partitions: The compiled programs of all graphs.
        breaks: Where and why Dynamo broke the graph.
        statistics: What the compiler did for this call: its counters, and seconds per stage.
        result: What the function returned.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        partitions: Sequence[Partition],
        programs: Sequence[Any],
        breaks: Sequence[Break],
        statistics: Statistics,
        result: Any,
    ) -> None:
        self.graphs = tuple(graphs)
        self.partitions = tuple(partitions)
        self.breaks = tuple(breaks)
        self.statistics = statistics
        self.result = result
        self._programs = tuple(programs)

    @property
    def impurities(self) -> tuple[Impurity, ...]:
        """The impure nodes of all graphs, each with what to do about it (`impurity.advice`)."""
        return tuple(impurity for graph in self.graphs for impurity in graph.impurities)

    def hlo(self, i: int, stage: str = "stablehlo", direction: str = "forward") -> str:
        """The text of one partition's program.

        Args:
            i: The number of the partition.
            stage: `"jaxpr"` as traced, `"stablehlo"` as lowered, or `"optimized"`, the HLO after XLA has compiled it.
            direction: `"forward"` or `"backward"`.

        Raises:
            IndexError: There is no such partition.
            ValueError: There is no such stage or direction, or the partition has no backward.
            DeviceError: The optimized HLO is that of a platform which JAX does not have here.
        """
        if not isinstance(i, int) or not 0 <= i < len(self.partitions):
            numbers = f"they are numbered 0 to {len(self.partitions) - 1}" if self.partitions else "there are none"
            raise IndexError(f"no partition {i!r}: {numbers}")
        for name, value, valid in (("stage", stage, STAGES), ("direction", direction, DIRECTIONS)):
            if value not in valid:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}")
        if direction == "backward" and self._programs[i].backward is None:
            raise ValueError(
                f"partition {i} has no backward: none of its outputs requires grad, or gradients were not recorded"
            )
        return getattr(self._programs[i], direction).text(stage)

    def save_html(self, path: str | PathLike[str]) -> Path:
        """Write the report as one page that needs nothing else, with a picture of each graph.

        Args:
            path: Where to write it.

        Returns:
            The path.
        """
        from pure_backend.inspect.page import page

        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path

    def summary(self) -> str:
        """One line of counts."""
        counts = (
            (len(self.graphs), "graph"),
            (len(self.partitions), "partition"),
            (len(self.impurities), "impure node"),
            (len(self.breaks), "graph break"),
        )
        return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=120)
        console.print(self)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<Report: {self.summary()}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The report as text and tables."""
        from rich.text import Text

        yield Text(self.summary(), style="bold")
        yield self._graph_table() if self.graphs else Text(NO_GRAPH)
        if self.partitions:
            yield self._partition_table()
        for title, lines in (("impure nodes, which run in eager", _impurity_lines(self)), ("graph breaks", _break_lines(self))):
            if lines:
                yield Text(f"\n{title}", style="bold")
                yield from (Text(line, overflow="fold") for line in lines)
        yield Text("\n" + counter_line(self.statistics))
        yield Text(seconds_line(self.statistics.seconds))

    def _graph_table(self) -> Table:
        from rich.table import Table

        table = Table("graph", "nodes", "partitions", "impure", "runs", title_justify="left")
        for number, graph in enumerate(self.graphs):
            count = sum(partition.graph == number for partition in self.partitions)
            runs = (
                f"in eager: {graph.eager}"
                if graph.eager
                else "compiled, with eager nodes between"
                if graph.impurities
                else "compiled"
            )
            table.add_row(str(number), str(graph.operators), str(count), str(len(graph.impurities)), runs)
        return table

    def _partition_table(self) -> Table:
        from rich.table import Table

        table = Table(*PARTITION_COLUMNS)
        for row in partition_rows(self.partitions):
            table.add_row(*row)
        return table


NO_GRAPH = (
    "Dynamo captured no graph: the function does nothing with tensors, or it is one that Dynamo skips, as torch's own are"
)
PARTITION_COLUMNS = ("partition", "graph", "nodes", "inputs", "outputs", "residuals", "FLOPs forward", "FLOPs backward")


def partition_rows(partitions: Sequence[Partition]) -> Iterator[tuple[str, ...]]:
    """The cells of the table of partitions."""
    for number, partition in enumerate(partitions):
        written = f", {partition.write_backs} written back" if partition.write_backs else ""
        yield (
            str(number),
            str(partition.graph),
            str(partition.nodes),
            f"{partition.inputs} ({show_bytes(partition.input_bytes)})",
            f"{partition.outputs} ({show_bytes(partition.output_bytes)}){written}",
            f"{partition.residuals} ({show_bytes(partition.residual_bytes)})" if partition.backward_flops is not None else "-",
            show_count(partition.flops),
            show_count(partition.backward_flops),
        )


def show_bytes(count: float) -> str:
    """A number of bytes, as `1.5 MB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def show_count(count: float | None) -> str:
    """A large number, as `1.5 G`."""
    if count is None:
        return "-"
    for unit in ("", " k", " M", " G"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.4g} T"


def counter_line(statistics: Statistics) -> str:
    """The counters, in words."""
    return (
        f"traces {statistics.traces}, lowerings {statistics.lowerings}, calls {statistics.calls}, "
        f"programs found in the cache {statistics.cache_hits}"
    )


def seconds_line(seconds: Mapping[str, float]) -> str:
    """The seconds of each stage that took any."""
    return "seconds: " + ", ".join(f"{stage} {spent:.3f}" for stage, spent in seconds.items() if spent)


def _impurity_lines(report: Report) -> list[str]:
    return [
        line
        for number, graph in enumerate(report.graphs)
        for impurity in graph.impurities
        for line in (f"  graph {number}: {impurity}", f"    what to do: {impurity.advice}")
    ]


def _break_lines(report: Report) -> list[str]:
    lines = []
    for found in report.breaks:
        lines.append(f"  {found}")
        lines += [f"    {line}" for line in found.explanation.splitlines()]
    return lines
