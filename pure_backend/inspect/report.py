"""What `explain` found: data, as text, as HLO, and as a page."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pure_backend.inspect.found import Found
from pure_backend.inspect.page import page
from pure_backend.inspect.tables import NO_GRAPH, PARTITION_COLUMNS, counter_line, partition_rows, seconds_line

if TYPE_CHECKING:
    from rich.table import Table

STAGES = ("jaxpr", "stablehlo", "optimized")
DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Report(Found):
    """What the compiler made of one call of a function.

    Attributes:
        programs: Both sides of each partition's program.
        result: What the function returned.
    """

    programs: tuple[Any, ...]
    result: Any

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
        side = self.programs[i].forward if direction == "forward" else self.programs[i].backward
        if side is None:
            raise ValueError(
                f"partition {i} has no backward: none of its outputs requires grad, or gradients were not recorded"
            )
        return side.text(stage)

    def save_html(self, path: str | PathLike[str]) -> Path:
        """Write the report as one page that needs nothing else, with a picture of each graph.

        Args:
            path: Where to write it.

        Returns:
            The path.
        """
        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path

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
