"""The options of the backend, as `torch.compile(..., options={...})` gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

_REMAT = ("auto", "none", "full")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose about a compilation.

    Args:
        remat: Which intermediate values the forward keeps for the backward. `"auto"` keeps the results of matrix
            products and convolutions and recomputes the cheap rest; `"none"` keeps everything JAX would keep; `"full"`
            keeps only the inputs; a callable is used as a `jax.checkpoint` policy.
        max_specializations: How many sets of shapes, dtypes and modes one compiled graph keeps before the least
            recently used one is dropped.

    Example:
        >>> torch.compile(model, backend="assume_pure", options={"remat": "full"})  # doctest: +SKIP
    """

    remat: str | Callable[..., Any] = "auto"
    max_specializations: int = 64

    def __post_init__(self) -> None:
        if not callable(self.remat) and self.remat not in _REMAT:
            raise ValueError(f"option 'remat' must be a callable or one of {_REMAT}, got {self.remat!r}")
        if not isinstance(self.max_specializations, int) or self.max_specializations < 1:
            raise ValueError(f"option 'max_specializations' must be a positive int, got {self.max_specializations!r}")

    @classmethod
    def of(cls, options: Options | Mapping[str, Any] | None) -> Options:
        """Options from what a caller gave.

        Raises:
            TypeError: An option does not exist; the message lists those that do.
        """
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        valid = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(valid))
        if unknown:
            raise TypeError(f"unknown option {', '.join(map(repr, unknown))}: valid options are {', '.join(valid)}")
        return cls(**options)
