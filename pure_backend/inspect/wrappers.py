"""Wrappers of distributed training that Dynamo looks through to no graph: it tells no backend of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pure_backend.inspect.found import Break

_WHY = (
    "Explanation: The wrapper's own frames are not captured, and from such a frame Dynamo enters no module whose forward is "
    "torch's: it runs in eager.\n"
    "Hint: give it a class of your own, `class Layers(nn.{name}): def forward(self, *args): return super().forward(*args)`"
    "{more}."
)
_COMPILE_BEFORE = ", or compile it before it is wrapped, `DDP(torch.compile(module, backend='assume_pure'))`"


def unseen(fn: Any) -> list[Break]:
    """A reason for each wrapped module of `fn` that Dynamo does not look into."""
    return list(_unseen(fn)) if isinstance(fn, nn.Module) else []


def _unseen(model: nn.Module) -> Iterator[Break]:
    for path, module in model.named_modules():
        wrapped, wrapper = _wrapped(module)
        if wrapped is not None and torch._dynamo.trace_rules.check(wrapped.forward):
            name = type(wrapped).__mro__[_depth(wrapper)].__name__
            where = f" ({path})" if path else ""
            more = _COMPILE_BEFORE if wrapper == _DDP else ""
            yield Break(f"{wrapper}{name}{where} is not compiled", _WHY.format(name=name, more=more))


_DDP, _FULLY_SHARD = "DistributedDataParallel around ", "fully_shard on "


def _depth(wrapper: str) -> int:
    """Where the user's class is: `fully_shard` gives a module a class of its own, made of it."""
    return 0 if wrapper == _DDP else 2


def _wrapped(module: nn.Module) -> tuple[nn.Module | None, str]:
    """The module whose forward the wrapper calls, and what to say before its name."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.module, _DDP
    fully_sharded = torch.distributed.is_available() and isinstance(module, _fsdp_module())
    return (module, _FULLY_SHARD) if fully_sharded else (None, "")


def _fsdp_module() -> type:
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule
