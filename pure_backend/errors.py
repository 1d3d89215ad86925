"""Everything pure_backend raises on purpose.

A mistake in a call of ours is a `TypeError` or `ValueError`; whatever the compiler itself finds is a `PureBackendError`.
"""

from __future__ import annotations


class PureBackendError(RuntimeError):
    """Root of the errors of the compiler."""


class UnsupportedOperatorError(PureBackendError):
    """An operator of the graph cannot be lowered to JAX.

    The message names the operator, the shapes and dtypes it was given and the user's source line.
    """


class DeviceError(PureBackendError):
    """A tensor lies on a device, or in a layout, that the partition's runtime cannot take."""


class LoweringError(PureBackendError):
    """A lowering gave a value that disagrees with PyTorch's own shape for the operator."""


class EnvironmentMismatchError(PureBackendError):
    """The installed packages do not fit together; the message has the command that mends them."""
