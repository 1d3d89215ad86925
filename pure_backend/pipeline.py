"""The passes that make a normalized graph a function of values, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from pure_backend import counters
from pure_backend.errors import ImpureGraphError
from pure_backend.fx_passes.border import Border
from pure_backend.fx_passes.chains import loop_chains
from pure_backend.fx_passes.functional import Functional
from pure_backend.fx_passes.inputs import check_inputs, fake_inputs
from pure_backend.fx_passes.mutation import functionalize
from pure_backend.fx_passes.propagate import propagate
from pure_backend.fx_passes.reach import gradient_reach
from pure_backend.fx_passes.repeats import share_repeats
from pure_backend.fx_passes.unwrap import has_wrappers, unwrap
from pure_backend.jax_bridge.lowerings.registry import has_lowering

Reach = Callable[[torch.Tensor], frozenset[int]]


class FunctionalGraph(NamedTuple):
    """A graph as a function of values.

    Attributes:
        functional: The function.
        reach: Which inputs a result's gradient reaches.
        device: The device that the arguments lie on.
        gm: The propagated graph that it was made from.
        border: If wrapper subclasses were taken apart, how calls of the original graph become calls of this one.
    """

    functional: Functional
    reach: Reach
    device: torch.device
    gm: fx.GraphModule
    border: Border | None


def functional_graph(gm: fx.GraphModule, args: Sequence[Any]) -> FunctionalGraph:
    """A normalized graph as a function of values, for the arguments of one call.

    Raises:
        ImpureGraphError: With every node that cannot be in a program.
    """
    device = check_inputs(gm, args)
    fake_mode, fakes = fake_inputs(gm, args)
    with counters.stage("propagate"):
        reach = gradient_reach(fakes)
        impurities = propagate(gm, fakes, fake_mode, has_lowering)
    if impurities:
        raise ImpureGraphError(impurities)
    if has_wrappers(gm):
        with counters.stage("unwrap"):
            border = unwrap(gm)
        return functional_graph(border.gm, border.enter(args))._replace(border=border)
    with counters.stage("mutation"):
        return FunctionalGraph(functionalize(gm), reach, device, gm, None)


def outline_repeats(gm: fx.GraphModule, choice: str) -> bool:
    """Make repeated stretches of a functional graph calls of one body, or loops of it; whether there are any.

    Args:
        gm: The graph.
        choice: See `Options.repeats`.
    """
    with counters.stage("repeats"):
        shared = choice != "off" and share_repeats(gm)
        if shared and choice == "scan":
            loop_chains(gm)
    return shared
