"""What every kind of plan is to those who call it or ask about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pure_backend.fx_passes.functional import WriteBack
from pure_backend.ir.geometry import ANYWHERE, Placed
from pure_backend.ir.impurity import Impurity
from pure_backend.jax_bridge.program import Program

if TYPE_CHECKING:
    from pure_backend.calls.staged import PureStage


class CallPlan(Protocol):
    """What calls of one signature do.

    Attributes:
        write_backs: The arguments that get new values.
        placed: The arguments whose place in memory it depends on, counted without the structures of wrappers.
        impurities: The nodes that no program holds.
        reason: Why all of the graph runs in eager; empty if it does not.
        lasting: Whether later calls of the signature do the same.
    """

    write_backs: tuple[WriteBack, ...] = ()
    placed: Placed = ANYWHERE
    impurities: tuple[Impurity, ...] = ()
    reason: str = ""
    lasting: bool = True

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs."""
        ...

    def programs(self) -> Sequence[Program]:
        """The programs that it calls itself."""
        return ()

    def stages(self) -> Sequence[PureStage]:
        """The parts of the graph that are compiled apart."""
        return ()


class Around(CallPlan):
    """A plan that does something before and after another one, and is else as that one is."""

    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan
        self.write_backs, self.placed = plan.write_backs, plan.placed

    def programs(self) -> Sequence[Program]:
        """The programs of the plan inside."""
        return self.plan.programs()
