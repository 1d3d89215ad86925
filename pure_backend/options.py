"""The options of the backend, as `torch.compile(..., options={...})` gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

_REMAT = ("auto", "none", "full")
_ON_IMPURE = ("eager", "error")
_REPEATS = ("auto", "scan", "off")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose about a compilation.

    Args:
        remat: Which intermediate values the forward keeps for the backward. `"auto"` keeps the results of matrix
            products, convolutions, kernels and softmax, and recomputes the cheap rest; `"none"` keeps everything JAX would
            keep; `"full"` keeps only the inputs; a callable is used as a `jax.checkpoint` policy.
        repeats: What happens to stretches that a graph has several times (layers, a function that is called in a loop):
            `"auto"` makes them calls of one function, which is traced, differentiated and lowered once, with the same numbers;
            `"scan"` makes a loop of those that follow each other, so that compilation does not grow with depth; parameters
            are stacked in each call, which costs memory and time; `"off"` leaves all as they are.
        max_specializations: How many sets of shapes, dtypes and modes one compiled graph keeps before the least
            recently used one is dropped.
        on_impure: What happens to a graph with nodes that cannot be part of a program: `"eager"` runs those nodes in
            eager between compiled partitions and logs the reasons once; `"error"` raises `ImpureGraphError` with them.
        min_partition_size: A partition beside impure nodes that has fewer nodes than this runs in eager too: a call of a
            program costs as much as several small operators.
        verify: Whether the first call of each specialization, and its first backward, are compared with eager on copies of the
            arguments; a difference raises `AccuracyError`, which names the first node that differs. A path is the folder
            where its reproducer is written, which is else a temporary one.

    Example:
        >>> torch.compile(model, backend="assume_pure", options={"remat": "full"})  # doctest: +SKIP
    """

    remat: str | Callable[..., Any] = "auto"
    repeats: str = "auto"
    max_specializations: int = 64
    on_impure: str = "eager"
    min_partition_size: int = 4
    verify: bool | str | PathLike[str] = False

    def __post_init__(self) -> None:
        if not callable(self.remat) and self.remat not in _REMAT:
            raise ValueError(f"option 'remat' must be a callable or one of {_REMAT}, got {self.remat!r}")
        if self.on_impure not in _ON_IMPURE:
            raise ValueError(f"option 'on_impure' must be one of {_ON_IMPURE}, got {self.on_impure!r}")
        if self.repeats not in _REPEATS:
            raise ValueError(f"option 'repeats' must be one of {_REPEATS}, got {self.repeats!r}")
        for name in ("max_specializations", "min_partition_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"option {name!r} must be a positive int, got {value!r}")

        if not isinstance(self.verify, (bool, str, PathLike)):
            raise ValueError(f"option 'verify' must be True, False or a folder, got {self.verify!r}")

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
