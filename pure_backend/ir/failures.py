"""The one place where an error in a pass becomes an `Impurity` of the node it happened at, so that the node runs in eager.

A pass that cannot do a node says so with `UnsupportedOperatorError`. Any other error is a fault of ours, and no reason to take
the user's model down: the node is left to eager, and the log says what failed. A suite of tests wants to see such faults, so it
runs in `faults_raised()`, where they are raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import fx

from pure_backend.errors import (
    AccuracyError,
    DeviceError,
    DonationError,
    EnvironmentMismatchError,
    ImpureFunctionError,
    ImpureGraphError,
    UnsupportedOperatorError,
)
from pure_backend.ir.impurity import Impurity

# What the user has to fix, even where eager would go on.
_USERS = (AccuracyError, DeviceError, DonationError, EnvironmentMismatchError, ImpureFunctionError)
_LONGEST = 2000  # characters of a message; XLA's can be megabytes

_raised = [False]


@contextlib.contextmanager
def faults_raised(raised: bool = True) -> Iterator[None]:
    """A scope in which faults of ours are raised instead of left to eager, in all threads; or, with False, are not."""
    before, _raised[0] = _raised[0], raised
    try:
        yield
    finally:
        _raised[0] = before


def failure(node: fx.Node, error: Exception) -> Impurity:
    """The impurity of a node at which a pass failed; call it where the error was caught.

    Raises:
        Exception: The error itself, if it is the user's to fix, or if faults are raised.
    """
    if isinstance(error, ImpureGraphError):  # of a graph inside of the node
        return Impurity.of(node, "no lowering", f"inside of it: {error.impurities[0]}")
    if isinstance(error, UnsupportedOperatorError):
        return Impurity.of(node, "no lowering", str(error))
    if isinstance(error, _USERS):
        raise error
    return Impurity.of(node, "fault", fault_text(error))


def graph_failure(error: Exception) -> ImpureGraphError:
    """What an error of the passes as a whole means: itself if it names nodes, else that the whole graph is impure.

    Raises:
        Exception: As `failure` does.
    """
    if isinstance(error, ImpureGraphError):
        return error
    if isinstance(error, UnsupportedOperatorError):
        return ImpureGraphError([Impurity("no lowering", "", "the graph", str(error))])
    if isinstance(error, _USERS):
        raise error
    return ImpureGraphError([Impurity("fault", "", "the graph", fault_text(error))])


def fault_text(error: Exception) -> str:
    """An error in words.

    Raises:
        Exception: The error itself, if faults are raised.
    """
    if _raised[0]:
        raise error
    return f"{type(error).__name__}: {error}"[:_LONGEST]
