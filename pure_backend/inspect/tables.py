"""What a report says, in words and rows; as text and as a page alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pure_backend.counters import Statistics
from pure_backend.inspect.found import Partition

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
