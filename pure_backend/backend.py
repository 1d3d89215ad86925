"""The Dynamo backend: `torch.compile(model, backend="assume_pure")`.

Dynamo's graph at the torch-function level is copied with its attributes as inputs (`normalize`). A call with new shapes,
dtypes, modes or overlaps then is specialised: run on fake tensors and freed of writes and views (`functional_graph`), its
repeated stretches made one (`outline_repeats`), traced, differentiated and lowered through JAX (`plan_call`), and kept. A call
seen before goes straight to its executable.

Where one of these finds nodes that cannot be in a program, the graph is cut (`partition`): its pure partitions go through the
same passes, the other nodes run in eager between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pure_backend import _compat, counters
from pure_backend.calls.plan import Bordered, Plan, plan_call
from pure_backend.calls.specializations import Specializations
from pure_backend.calls.staged import Staged
from pure_backend.errors import ImpureGraphError
from pure_backend.fx_passes.functional import Functional
from pure_backend.fx_passes.inline import inline_checkpoints
from pure_backend.fx_passes.mutation import functionalize
from pure_backend.fx_passes.normalize import Normalized, normalize
from pure_backend.fx_passes.partition import partition
from pure_backend.ir.failures import graph_failure
from pure_backend.ir.impurity import Impurity
from pure_backend.options import Options
from pure_backend.pipeline import Reach, functional_graph, outline_repeats


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
    chosen = Options.of(options)
    with counters.stage("normalize"):
        normalized = normalize(gm)
    specializations = compiled_graph(normalized, chosen)

    @_compat.opaque
    def call(*args: Any) -> Any:
        return specializations(*args)

    return call


def verified(plan: Plan, gm: fx.GraphModule, functional: Functional, verify: Any) -> Any:
    """A plan whose first call is compared with eager."""
    from pure_backend.verify.verified import Verified

    return Verified(plan, gm, functional, None if verify is True else verify)


def compiled_graph(normalized: Normalized, options: Options) -> Specializations:
    """A graph, or a pure partition of one, that is compiled when it is called."""
    gm = normalized.gm

    def specialize(args: Sequence[Any]) -> Plan | Bordered:
        functional, reach, device, plain, border = functional_graph(gm, args)
        plan = plan_functional(functional, reach, device, plain)
        return plan if border is None else Bordered(plan, border)

    def plan_functional(functional: Functional, reach: Reach, device: torch.device, gm: fx.GraphModule) -> Plan:
        if options.verify is not False:  # it compares node by node
            return verified(plan_call(functional, reach, device, options), gm, functional, options.verify)
        shared = options.repeats != "off"
        try:
            shared = outline_repeats(functional.gm, options.repeats)
            return plan_call(functional, reach, device, options)
        except Exception as error:
            graph_failure(error)
            if not shared:
                raise
        return plan_call(functionalize(gm), reach, device, options)  # names each node that has no lowering

    def specialize_inlined(args: Sequence[Any]) -> Any:
        try:
            return specialize(args)
        except ImpureGraphError as error:
            if not inline_checkpoints(gm, error.impurities):
                raise
            return specialize_inlined(args)

    def cut(impurities: Sequence[Impurity]) -> Staged:
        with counters.stage("partition", f"around {len(impurities)} impure nodes"):
            stages, grad_after = partition(gm, [impurity.node for impurity in impurities], options.min_partition_size)
        return Staged(gm, stages, grad_after, impurities, lambda part: compiled_graph(Normalized(part, ()), options))

    return Specializations(normalized, specialize_inlined, cut, options)
