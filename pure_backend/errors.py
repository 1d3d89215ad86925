"""Everything pure_backend raises on purpose.

A mistake in a call of ours is a `TypeError` or `ValueError`; whatever the compiler itself finds is a `PureBackendError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PureBackendError(RuntimeError):
    """Root of the errors of the compiler."""


class UnsupportedOperatorError(PureBackendError):
    """An operator of the graph cannot be lowered to JAX.

    The message names the operator, the shapes and dtypes it was given and the user's source line.
    """


class ImpureGraphError(PureBackendError):
    """A graph has nodes that cannot be part of a program, and eager is not allowed (`options={"on_impure": "error"}`).

    Attributes:
        impurities: The `Impurity` of each such node.
    """

    def __init__(self, impurities: Sequence[Any]) -> None:
        self.impurities = tuple(impurities)
        listed = "".join(f"\n- {impurity}\n  {impurity.advice}" for impurity in self.impurities)
        super().__init__(f"a graph has {len(self.impurities)} impure node(s):{listed}")


class DeviceError(PureBackendError):
    """A tensor lies on a device, or in a layout, that the partition's runtime cannot take."""


class ImpureFunctionError(PureBackendError):
    """A function that was said to be pure is not (`assume_pure(fn, check=True)`)."""


class DonationError(PureBackendError):
    """A donated tensor is also used in another way, by which it would be read after its memory was given away."""


class LoweringError(PureBackendError):
    """A lowering gave a value that disagrees with PyTorch's own shape for the operator."""


class AccuracyError(PureBackendError):
    """A compiled graph gave other values than eager (`options={"verify": True}`).

    Attributes:
        node: The name of the first node that differs, or an empty string if none does on its own.
        error: The largest difference of that node; infinite where shapes, dtypes, NaN or infinity differ.
        reproducer: A Python file that shows it, or None.
    """

    def __init__(self, message: str, node: str = "", error: float = float("inf"), reproducer: Path | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.error = error
        self.reproducer = reproducer


class RanksDisagreeError(PureBackendError):
    """The ranks of a mesh do not have the same program for the same arguments, or one of them does not come to run it."""


class EnvironmentMismatchError(PureBackendError):
    """The installed packages do not match; the message has the command that fixes them."""
