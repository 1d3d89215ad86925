"""Time of the partitioner by the size of the graph: it is to grow with the number of nodes and no faster.

    python benchmarks/partition.py

The graphs are chains of small operators with an impure node every so often, the worst case: as many stages as impure nodes.
"""

from __future__ import annotations

import time

import torch
from _measure import arguments, print_machine, print_table, verdict
from torch import fx

import pure_backend
from pure_backend.fx_passes.inputs import fake_inputs
from pure_backend.fx_passes.partition import partition
from pure_backend.fx_passes.propagate import propagate


@pure_backend.impure
def watch(x: torch.Tensor) -> torch.Tensor:
    """An impure node."""
    return x


def chain(nodes: int, every: int) -> fx.GraphModule:
    """A graph of that many nodes, every so many of them impure."""
    graph = fx.Graph()
    x = value = graph.placeholder("x")
    for i in range(nodes):
        value = graph.call_function(watch, (value,)) if i % every == every - 1 else graph.call_function(torch.add, (value, x))
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


def measure(nodes: int, every: int) -> tuple[float, float, int]:
    """Seconds of propagation and of partitioning, and the number of stages."""
    gm = chain(nodes, every)
    mode, fakes = fake_inputs(gm, [torch.ones(3)])
    started = time.perf_counter()
    impurities = propagate(gm, fakes, mode, lambda op: True)
    propagated = time.perf_counter()
    stages, _ = partition(gm, [impurity.node for impurity in impurities], 4)
    return propagated - started, time.perf_counter() - propagated, len(stages)


def main() -> None:
    """Measure and print."""
    args = arguments(__doc__, rounds=1).parse_args()
    sizes = (500, 1000) if args.quick else (2_500, 5_000, 10_000, 20_000)
    print_machine()
    rows = []
    for nodes in sizes:
        for every in (20, 1000):
            propagated, seconds, stages = measure(nodes, every)
            rows.append((str(nodes), str(stages), f"{propagated:.2f}", f"{seconds:.2f}", f"{1e6 * seconds / nodes:.1f}"))
    print_table("partition", ("nodes", "stages", "propagate s", "partition s", "partition us a node"), rows)
    verdict(f"partitioning {sizes[-1]} nodes", max(float(row[3]) for row in rows), 2.0, "s")


if __name__ == "__main__":
    main()
