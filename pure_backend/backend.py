"""The Dynamo backend: `torch.compile(model, backend="assume_pure")`.

A graph is normalized once. A call with new shapes, dtypes, modes or overlaps is specialized: the passes make it a function of
values (`pipeline.py`), which is traced, differentiated and lowered through JAX (`plan_call`), and kept. A call seen before goes
straight to its executable.

Where one of these finds nodes that cannot be in a program, the graph is cut (`partition`): its pure partitions go through the
same passes, the other nodes run in eager between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from pure_backend import counters
from pure_backend.calls.call_plan import CallPlan
from pure_backend.calls.plan import Bordered, plan_call
from pure_backend.calls.specializations import Specializations
from pure_backend.calls.staged import Staged
from pure_backend.errors import ImpureGraphError
from pure_backend.fx_passes.inline import inline_checkpoints
from pure_backend.fx_passes.layouts import outside, whole_graph
from pure_backend.fx_passes.normalize import Normalized
from pure_backend.fx_passes.partition import partition
from pure_backend.fx_passes.repeats import calls_bodies
from pure_backend.ir.failures import graph_failure
from pure_backend.ir.impurity import Impurity
from pure_backend.ir.opaque import opaque
from pure_backend.options import Options
from pure_backend.pipeline import normalize, prepare
from pure_backend.verify.verified import Verified


def assume_pure(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph through JAX.

    Args:
        gm: Dynamo's graph; it is not changed.
        example_inputs: Dynamo's example inputs; not used, since the real inputs of each call decide.
        options: See `Options`; what `torch.compile(..., options={...})` gives.
        mode: Not used by this backend.

    Returns:
        A function of the graph's inputs that returns the graph's outputs.

    Raises:
        TypeError: An unknown option, or a `mode`.
    """
    if mode is not None:
        raise TypeError(f"backend 'assume_pure' has no modes, got mode={mode!r}: use options={{...}}")
    specializations = compiled_graph(normalize(gm), Options.of(options))

    @opaque
    def call(*args: Any) -> Any:
        return specializations(*args)

    return call


def compiled_graph(normalized: Normalized, options: Options) -> Specializations:
    """A graph, or a pure partition of one, that is compiled when it is called."""
    gm = normalized.gm

    def specialize(args: Sequence[Any]) -> CallPlan:
        try:
            return plan_graph(gm, args, options)
        except ImpureGraphError as error:
            if not inline_checkpoints(gm, error.impurities):
                raise
        return specialize(args)

    def cut(impurities: Sequence[Impurity]) -> Staged:
        with counters.timed("partition", f"around {len(impurities)} impure nodes"):
            stages, grad_after = partition(gm, [impurity.node for impurity in impurities], options.min_partition_size)
        return Staged(gm, stages, grad_after, impurities, lambda part: compiled_graph(Normalized(part, ()), options))

    return Specializations(normalized, specialize, cut, options)


def plan_graph(gm: fx.GraphModule, args: Sequence[Any], options: Options) -> CallPlan:
    """The plan of a pure graph for calls like this one.

    Raises:
        ImpureGraphError: With every node that cannot be in a program.
    """
    alone = dataclasses.replace(options, repeats="off")
    prepared = prepare(gm, args, options if options.verify is False else alone)  # verification compares node by node
    if options.verify is not False and prepared.mesh is not None:
        raise ImpureGraphError([outside("option 'verify' compares on one device")])
    try:
        plan = plan_call(prepared, options.remat)
    except Exception as error:
        failed = graph_failure(error)
        if prepared.mesh is not None:
            raise ImpureGraphError(whole_graph(failed.impurities)) from error
        if not calls_bodies(prepared.functional.gm):
            raise
        return plan_graph(gm, args, alone)  # names each node that has no lowering
    checked = plan if options.verify is False else Verified(plan, prepared, options.verify)
    return checked if prepared.border is None else Bordered(checked, prepared.border)
