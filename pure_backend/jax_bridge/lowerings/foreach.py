"""`torch._foreach_*`: an operator on each element of lists of tensors, as optimizers use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pure_backend.jax_bridge.lowerings.registry import Lowering, Site, find, lowers, updates

_NAMES = (
    *("abs", "neg", "sqrt", "rsqrt", "reciprocal", "sign", "exp", "log", "square", "copy"),
    *("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_max", "clamp_min"),
    *("lerp", "addcmul", "addcdiv"),
)
_FACTOR_LAST = ("addcmul", "addcdiv")  # a fourth argument is the keyword `value` of the operator on tensors


def _each(name: str) -> Lowering:
    """The lowering of a list operator by that of the operator on tensors."""

    def lower(site: Site, *args: Any, **kwargs: Any) -> tuple:
        if name in _FACTOR_LAST and len(args) == 4:
            args, kwargs = args[:3], {"value": args[3]}
        one: Any = find(name)
        count = next(len(arg) for arg in args if isinstance(arg, (tuple, list)))
        results = []
        for i in range(count):
            fakes = tuple(_pick(fake, i) for fake in site.args[: len(args)])
            out = fakes[0] if site.out is None else site.out[i]
            picked = {key: _pick(value, i) for key, value in kwargs.items()}
            element = dataclasses.replace(site, out=out, args=fakes, writes=())
            results.append(one(element, *(_pick(arg, i) for arg in args), **picked))
        return tuple(results)

    return lower


def _in_place(name: str) -> Lowering:
    each = _each(name)

    @updates
    def lower(site: Site, *args: Any, **kwargs: Any) -> tuple:
        new = each(dataclasses.replace(site, out=None), *args, **kwargs)
        return None if site.out is None else new, *new

    return lower


def _pick(value: Any, i: int) -> Any:
    """The i-th element of a list, or what all share."""
    return value[i] if isinstance(value, Sequence) and not isinstance(value, str) else value


for _name in _NAMES:
    lowers(f"_foreach_{_name}")(_each(_name))
    lowers(f"_foreach_{_name}_")(_in_place(_name))
