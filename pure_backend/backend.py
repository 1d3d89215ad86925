"""The Dynamo backend: `torch.compile(model, backend="assume_pure")`.

Dynamo's graph at the torch-function level is copied with its attributes as inputs (`normalize`). A call with new shapes,
dtypes, modes or overlaps then is specialised: run on fake tensors (`propagate`), freed of writes and views (`functionalize`),
traced, differentiated and lowered through JAX (`compile_graph`), and kept. A call seen before goes straight to its executable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from pure_backend import counters
from pure_backend.fx_passes.inputs import check_inputs, fake_inputs
from pure_backend.fx_passes.mutation import functionalize
from pure_backend.fx_passes.normalize import normalize
from pure_backend.fx_passes.propagate import propagate
from pure_backend.fx_passes.reach import gradient_reach
from pure_backend.options import Options
from pure_backend.specialize import Plan, Specializations, plan_call


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

    def specialize(args: Sequence[Any]) -> Plan:
        device = check_inputs(normalized.gm, args)
        fake_mode, fakes = fake_inputs(args)
        with counters.stage("propagate"):
            reach = gradient_reach(fakes)
            propagate(normalized.gm, fakes, fake_mode)
        with counters.stage("mutation"):
            functional = functionalize(normalized.gm)
        return plan_call(functional, reach, device, chosen)

    specializations = Specializations(normalized, specialize, chosen.max_specializations)

    def call(*args: Any) -> Any:
        return specializations(*args)

    return call
