"""Cold prepare, hot apply: the plans of one compiled graph, one for each signature it was called with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from pure_backend.calls.call_plan import CallPlan
from pure_backend.calls.difference import signature_difference
from pure_backend.calls.eager import EagerPlan, Trial
from pure_backend.calls.guard import Guard, WrapperGuard, guard_of
from pure_backend.calls.places import has_strides, overlapping
from pure_backend.calls.signature import signature
from pure_backend.calls.staged import Staged
from pure_backend.fx_passes.checks import trust
from pure_backend.fx_passes.normalize import Normalized
from pure_backend.ir.failures import graph_failure
from pure_backend.ir.geometry import ANYWHERE
from pure_backend.ir.impurity import Impurity
from pure_backend.ir.modes import saved_tensors_unseen
from pure_backend.ir.wrapper import pieces_of, spread
from pure_backend.options import Options

_logger = logging.getLogger("pure_backend")
_decisions = logging.getLogger("pure_backend.specialize")


class Specializations:
    """The plans of one graph by signature, the least recently used dropped first.

    A graph that turned out to be impure for one signature is cut into stages for all later ones.
    """

    def __init__(
        self,
        normalized: Normalized,
        make: Callable[[Sequence[Any]], CallPlan],
        cut: Callable[[Sequence[Impurity]], Staged],
        options: Options,
    ) -> None:
        self.normalized = normalized
        self.make = make
        self.cut = cut
        self.options = options
        self.plans: dict[Any, CallPlan] = {}
        self.staged: Staged | EagerPlan | None = None
        self.latest: tuple[Guard | WrapperGuard, CallPlan] | None = None
        self.placed = ANYWHERE
        self.lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        if self.normalized.lifted:
            args = (*args, *self.normalized.read_lifted())
        if (latest := self.latest) is not None and latest[0](args):
            return latest[1](args)
        return self.find(args)(args)

    def find(self, args: Sequence[Any]) -> CallPlan:
        """The plan of a call unlike the one before."""
        seen = signature(args, self.placed)
        plan = self.plans.get(seen)
        if plan is None:
            plan = self.specialize(args)
        else:  # the most recently used comes last
            self.plans.pop(seen, None)
            self.plans[seen] = plan
        if plan.lasting and all(has_strides(a) for a in spread(args) if isinstance(a, torch.Tensor)):
            self.latest = (guard_of(args, self.placed), plan)
        return plan

    def specialize(self, args: Sequence[Any]) -> CallPlan:
        """A new plan; one thread at a time, since the graph is annotated while it is made."""
        with self.lock, saved_tensors_unseen():
            if (known := self.plans.get(signature(args, self.placed))) is not None:
                return known
            if _decisions.isEnabledFor(logging.INFO):
                _decisions.info("a new specialization: %s", self.reason(args))
            plan = self.staged or self.new_plan(args)
            if not plan.lasting:
                return plan
            self.placed |= plan.placed
            if reason := _unknown_overlap(plan, args):
                plan = EagerPlan(self.normalized.gm, reason)
            self.plans[signature(args, self.placed)] = plan
            while len(self.plans) > self.options.max_specializations:
                self.plans.pop(next(iter(self.plans)), None)
            return plan

    def known(self) -> tuple[CallPlan, ...]:
        """The plans that it keeps, each once."""
        return tuple(dict.fromkeys(self.plans.values()))

    def reason(self, args: Sequence[Any]) -> str:
        """Why a call needs a plan of its own."""
        placeholders = self.normalized.gm.graph.find_nodes(op="placeholder", sort=True)
        names = [node.name for node, a in zip(placeholders, args, strict=True) for _ in spread([a])]
        return signature_difference(signature(args, self.placed), list(self.plans), names)

    def new_plan(self, args: Sequence[Any]) -> CallPlan:
        """A plan of the whole graph, or of its stages if it is impure.

        Raises:
            ImpureGraphError: It is impure, or a pass failed, and the user wants to know.
        """
        if forward_ad._current_level >= 0:
            return EagerPlan(self.normalized.gm, "forward-mode derivatives are being taken (torch.autograd.forward_ad)")
        try:
            return self.make(args)
        except Exception as error:
            refusal = graph_failure(error)
            if suspected := [impurity.detail for impurity in refusal.impurities if impurity.kind == "suspected"]:
                return Trial(self.normalized.gm, lambda: list(map(trust, suspected)))
            if self.options.on_impure == "error":
                raise refusal from error
            return self.in_eager(refusal.impurities)

    def in_eager(self, impurities: Sequence[Impurity]) -> CallPlan:
        """A plan that leaves impure nodes to eager, or the whole graph if that is what is impure."""
        whole = [str(impurity) for impurity in impurities if not impurity.node]
        if whole:
            return EagerPlan(self.normalized.gm, "; ".join(whole))
        if any(impurity.kind == "raises" for impurity in impurities):
            return Trial(self.normalized.gm, lambda: self.stage(impurities))
        return self.stage(impurities)

    def stage(self, impurities: Sequence[Impurity]) -> CallPlan:
        """Cut the graph around its impure nodes, for this call and all later ones."""
        with self.lock:
            try:
                self.staged = self.cut(impurities)
            except Exception as error:
                self.staged = EagerPlan(self.normalized.gm, str(graph_failure(error)))
            return self.staged


def _unknown_overlap(plan: CallPlan, args: Sequence[Any]) -> str:
    """Why a plan cannot know how an input that it writes overlaps with another one, or an empty string."""
    args = pieces_of(args)
    for group in overlapping(args, plan.placed.shared):
        if args[group[0]].is_xla:  # strides do not say which part of its storage a view shows
            return "it writes an xla tensor that shares memory with another input"
        if len({args[i].untyped_storage()._cdata for i in group}) > 1:
            return "it writes an input whose memory another input shows through another storage"
    return ""
