"""The passes, in their order: they make Dynamo's graph a function of values, which a program is traced from.

`OF_A_GRAPH` run once, `OF_A_CALL` once per signature; a graph is linted after each of them, and nobody edits it afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pure_backend import counters
from pure_backend.errors import ImpureGraphError
from pure_backend.fx_passes.border import Border
from pure_backend.fx_passes.chains import loop_chains
from pure_backend.fx_passes.functional import Functional
from pure_backend.fx_passes.functorch import group_regions, open_functions
from pure_backend.fx_passes.inputs import check_inputs, fake_inputs
from pure_backend.fx_passes.layouts import MeshBorder, mesh_border, outside, whole_graph
from pure_backend.fx_passes.mutation import functionalize
from pure_backend.fx_passes.normalize import Normalized, lift_attributes
from pure_backend.fx_passes.propagate import propagate
from pure_backend.fx_passes.reach import Reach, gradient_reach
from pure_backend.fx_passes.repeats import share_repeats
from pure_backend.fx_passes.scopes import name_scopes
from pure_backend.fx_passes.sharding import thread_annotations
from pure_backend.fx_passes.stacks import hoist_stacks
from pure_backend.fx_passes.tensors import tensors_only
from pure_backend.fx_passes.unwrap import has_wrappers, unwrap
from pure_backend.ir.donors import take_markers
from pure_backend.ir.facts import facts
from pure_backend.ir.layout import MeshOfRanks
from pure_backend.jax_bridge.lowerings.registry import has_lowering
from pure_backend.options import Options

Fakes = Callable[[fx.GraphModule, Sequence[Any]], tuple[FakeTensorMode, list[Any]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A graph as a function of values, for the arguments of one call.

    Attributes:
        functional: The function.
        reach: For each of its results, the inputs that the result's gradient reaches.
        device: The device that the arguments lie on.
        source: The propagated graph of plain tensors that it was made from.
        border: If wrapper subclasses were taken apart, or plain tensors meet DTensors, how calls of the original graph become
            calls of `source`.
        mesh: The mesh of the DTensors among the arguments.
    """

    functional: Functional
    reach: tuple[frozenset[int], ...]
    device: torch.device
    source: fx.GraphModule
    border: Border | MeshBorder | None
    mesh: MeshOfRanks | None = None

    @property
    def place(self) -> torch.device | MeshOfRanks:
        """Where its program runs."""
        return self.device if self.mesh is None else self.mesh


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """What the passes of a call hand on: what was asked for, and what they have found so far."""

    gm: fx.GraphModule
    args: Sequence[Any]
    options: Options
    alone: Sequence[torch.Tensor]
    fakes: Fakes
    device: torch.device | None = None
    reach: Reach = lambda tensor: frozenset()
    border: Border | MeshBorder | None = None
    functional: Functional | None = None


def _propagate(draft: Draft) -> Draft:
    """Facts in every node, for these arguments."""
    device = check_inputs(draft.gm, draft.args)
    fake_mode, fakes = draft.fakes(draft.gm, draft.args)
    with counters.timed("propagate"):
        reach = gradient_reach(fakes)
        impurities = propagate(draft.gm, fakes, fake_mode, has_lowering)
    if impurities:
        raise ImpureGraphError(whole_graph(impurities) if isinstance(draft.border, MeshBorder) else impurities)
    return dataclasses.replace(draft, device=device, reach=reach)


def _unwrap(draft: Draft) -> Draft:
    """Wrapper subclasses become their plain tensors."""
    if not has_wrappers(draft.gm):
        return draft
    if isinstance(draft.border, MeshBorder):
        raise ImpureGraphError([outside("a tensor subclass beside DTensors")])
    with counters.timed("unwrap"):
        border = unwrap(draft.gm)
    return _propagate(dataclasses.replace(draft, gm=border.gm, args=border.enter(draft.args), border=border))


def _functionalize(draft: Draft) -> Draft:
    """Writes and views become values."""
    with counters.timed("mutation"):
        return dataclasses.replace(draft, functional=functionalize(draft.gm))


def _share_repeats(draft: Draft) -> Draft:
    """Repeated stretches become calls of one body, or loops of it."""
    with counters.timed("repeats"):
        if draft.options.repeats != "off" and share_repeats(draft.functional.gm) and draft.options.repeats == "scan":
            loop_chains(draft.functional.gm)
    return draft


def _hoist_stacks(draft: Draft) -> Draft:
    """What the turns of a loop have of their own is stacked before the program."""
    alone = {id(tensor) for tensor in draft.alone}
    kept = [i for i, arg in enumerate(draft.args) if id(arg) in alone]
    return dataclasses.replace(draft, functional=hoist_stacks(draft.functional, kept))


def _tensors_only(draft: Draft) -> Draft:
    """Only tensors are inputs."""
    return dataclasses.replace(draft, functional=tensors_only(draft.functional))


def _hold_layouts(draft: Draft) -> Draft:
    """On a mesh parameters, results and new values lie as their owners want them."""
    if isinstance(draft.border, MeshBorder):
        draft.border.hold(draft.functional, draft.args)
    return draft


OF_A_GRAPH = (name_scopes, take_markers, thread_annotations, group_regions, open_functions)
OF_A_CALL = (_propagate, _unwrap, _functionalize, _share_repeats, _hoist_stacks, _tensors_only, _hold_layouts)


def normalize(gm: fx.GraphModule) -> Normalized:
    """A private copy of Dynamo's graph, in the form that every call of it begins with."""
    with counters.timed("normalize"):
        normalized = lift_attributes(gm)
        for run in OF_A_GRAPH:
            run(normalized.gm)
            normalized.gm.graph.lint()
    return normalized


def prepare(
    gm: fx.GraphModule,
    args: Sequence[Any],
    options: Options,
    alone: Sequence[torch.Tensor] = (),
    fakes: Fakes = fake_inputs,
) -> Prepared:
    """A normalized graph as a function of values.

    Args:
        gm: The graph; its nodes are annotated.
        args: The arguments of the call.
        options: The user's options.
        alone: Arguments that each stay an input by themselves, since the caller exchanges them.
        fakes: Makes the fake arguments.

    Raises:
        DeviceError: The arguments lie on several devices.
        ImpureGraphError: With every node that cannot be in a program.
    """
    border = mesh_border(gm, args)
    draft = Draft(gm, args, options, alone, fakes)
    if border is not None:
        draft = Draft(border.gm, border.enter(args), options, alone, fakes, border=border)
    for run in OF_A_CALL:
        draft = run(draft)
        (draft.functional or draft).gm.graph.lint()
    return _finished(draft)


def _finished(draft: Draft) -> Prepared:
    functional = draft.functional
    results = zip(functional.gm.graph.output_node().args[0], functional.differentiable, strict=True)
    reach = (draft.reach(facts(node).value) if carries else () for node, carries in results)
    mesh = draft.border.mesh if isinstance(draft.border, MeshBorder) else None
    return Prepared(functional, tuple(map(functional.inputs.of, reach)), draft.device, draft.gm, draft.border, mesh)
