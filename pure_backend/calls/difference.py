"""Why a call needs a new plan: what its signature has that the nearest known one has not, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pure_backend.calls.signature import MODES
from pure_backend.ir.describe import DTYPES

_TENSOR = ("shape", "stride", "dtype", "requires_grad", "device", "kind")
_SHOWN = 3


def signature_difference(new: tuple[Any, ...], known: Sequence[tuple[Any, ...]], names: Sequence[str]) -> str:
    """What tells a signature from the one of the known that it shares most with.

    Args:
        new: A signature, see `signature.signature`.
        known: Signatures of the same graph.
        names: Of the graph's inputs.
    """
    if not known:
        return "the first call of a graph (if Dynamo captured it anew, TORCH_LOGS=recompiles says why)"
    nearest = min(known, key=lambda old: sum(a != b for a, b in zip(old, new, strict=True)))
    whats = [f"input {i} ({name})" for i, name in enumerate(names)]
    whats += [*MODES, "which inputs share memory"]
    changes = [_change(what, a, b) for what, a, b in zip(whats, nearest, new, strict=True) if a != b]
    more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return "; ".join(changes[:_SHOWN]) + more


def _change(what: str, old: Any, new: Any) -> str:
    if not (_is_tensor(old) and _is_tensor(new)):
        return f"{what}: {_value(old)} became {_value(new)}"
    if (old[0], old[2]) != (new[0], new[2]):
        return f"{what}: {_value(old)} became {_value(new)}"
    parts = [f"{part} of {what}: {a} became {b}" for part, a, b in zip(_TENSOR, old, new, strict=True) if a != b]
    return "; ".join(parts)


def _is_tensor(seen: Any) -> bool:
    return isinstance(seen, tuple) and len(seen) == len(_TENSOR) and isinstance(seen[0], torch.Size)


def _value(seen: Any) -> str:
    if _is_tensor(seen):
        return f"{DTYPES.get(seen[2], str(seen[2]))}[{', '.join(map(str, seen[0]))}]"
    return repr(seen[1]) if isinstance(seen, tuple) and len(seen) == 2 and isinstance(seen[0], type) else str(seen)
