"""Which JAX function lowers which torch operator.

A lowering is `fn(site, *args, **kwargs)`: the node's arguments with arrays in the place of tensors, and a `Site` that knows the
node's expected result. It returns the result as arrays; a tensor method that writes its first argument (`add_`, `copy_`)
returns that argument's new value. The walker casts the result to torch's dtype and checks its shape.

A call whose arguments a lowering does not take, or for which it returns `NotImplemented`, is decomposed by torch; a call of
which it knows that JAX cannot do it raises `unsupported(site, reason)` and is left to eager.

To add one: write the function in the file of its family, name the operators in `@lowers(...)`, add a row to the test of the
family. Names are `add` for `torch.add`, `Tensor.add`, `operator.add` and `aten.add`; `F.gelu` for functions of
`torch.nn.functional` whose signature is their own; `aten::name` or `aten::name.overload` for ATen alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from pure_backend.errors import UnsupportedOperatorError
from pure_backend.ir.describe import describe_node, qualified_name
from pure_backend.jax_bridge.avals import supported_dtype, to_jax_dtype
from pure_backend.jax_bridge.rng import KeyStream

Lowering = Callable[..., Any]

Content = Callable[..., str]

_LOWERINGS: dict[str, Lowering] = {}
_CONTENTS: dict[str, Content] = {}


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a lowering is applied.

    Attributes:
        node: The graph node.
        out: Torch's own result on fake tensors: its shapes and dtypes are what the lowering has to give.
        args: The node's positional arguments with fake tensors.
        keys: Keys for random operators.
        body: Traces a nested graph: `body(gm, arrays, keys=None) -> arrays`.
        writes: For a writing function, the flat tensor arguments that it writes.
        bodies: For a higher-order operator, its bodies as functions of values.
        shared: What the lowerings of one trace share, by content: functions that are traced once.
    """

    node: fx.Node
    out: Any
    args: tuple
    keys: KeyStream
    body: Callable[..., Any]
    writes: tuple[int, ...] = ()
    bodies: tuple[fx.GraphModule, ...] = ()
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> Any:
        """JAX dtype of the (first) result."""
        out = self.out[0] if isinstance(self.out, (tuple, list)) else self.out
        if not supported_dtype(out.dtype):
            raise unsupported(self, f"JAX has no {out.dtype}")
        return to_jax_dtype(out.dtype)

    def promoted(self, *args: Any) -> Any:
        """The JAX dtype that torch computes in for these fake tensors and Python scalars."""
        _, result = elementwise_dtypes(*args, type_promotion_kind=PROMOTION.DEFAULT)
        return to_jax_dtype(result)


def unsupported(site: Site, reason: str) -> UnsupportedOperatorError:
    """The error of a lowering that cannot do a variant of its operator: `raise unsupported(site, "JAX has no ...")`."""
    return UnsupportedOperatorError(f"{reason}\n{describe_node(site.node)}")


def lowers(*names: str, content: Content | None = None) -> Callable[[Lowering], Lowering]:
    """Register a lowering for operators.

    Args:
        names: Of the operators.
        content: For an operator that its author may change, what it computes as text: `content(platform, *args, **kwargs)`,
            with fake tensors among the arguments of a call. Programs with an operator that has none are not stored on disk.

    Raises:
        ValueError: One of them has a lowering already.
    """

    def register(fn: Lowering) -> Lowering:
        for name in names:
            if content is not None:
                _CONTENTS[name] = content
            if name in _LOWERINGS:
                raise ValueError(f"operator {name!r} has a lowering already: {_LOWERINGS[name].__qualname__}")
            _LOWERINGS[name] = _called_as_torch_calls(name, fn)
        return fn

    return register


def _called_as_torch_calls(name: str, fn: Lowering) -> Lowering:
    """`fn`, with keywords that it names otherwise put in the places where torch's schema has them.

    A call that still does not fit, a variant that the lowering does not know, is torch's to decompose.
    """
    signature = inspect.signature(fn)
    known = set(signature.parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return fn

    @functools.wraps(fn)
    def lower(site: Site, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= known:
            args, kwargs = _by_position(name, args, kwargs)
        try:
            signature.bind(site, *args, **kwargs)
        except TypeError:
            return NotImplemented
        return fn(site, *args, **kwargs)

    return lower


def _by_position(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Keywords as positional arguments, as far as one of the overloads has all of them."""
    packet = getattr(torch.ops.aten, name.split("::")[-1].split(".")[0], None)
    for overload in packet.overloads() if packet is not None else ():
        places = [a.name for a in getattr(packet, overload)._schema.arguments if not a.kwarg_only]
        if kwargs.keys() <= {a.name for a in getattr(packet, overload)._schema.arguments}:
            rest = dict(kwargs)
            taken = list(args)
            while len(taken) < len(places) and places[len(taken)] in rest:
                taken.append(rest.pop(places[len(taken)]))
            return tuple(taken), rest
    return args, kwargs


def updates(fn: Lowering) -> Lowering:
    """Mark a lowering that, when `site.writes`, returns `(result, *new values of the written arguments)`."""
    fn.updates_arguments = True  # type: ignore[attr-defined]
    return fn


def updates_arguments(fn: Lowering) -> bool:
    """Whether a lowering was marked with `updates`."""
    return getattr(fn, "updates_arguments", False)


def find(target: Any) -> Lowering | None:
    """The lowering of a node's target, or None."""
    for name in names_of(target):
        if (found := _LOWERINGS.get(name)) is not None:
            return found
    return None


def content_of(target: Any) -> Content | None:
    """What tells an operator's content, or None."""
    return next((_CONTENTS[name] for name in names_of(target) if name in _CONTENTS), None)


def has_lowering(target: Any) -> bool:
    """Whether an operator of a library (`torch.ops.ns.name`) has a lowering, or a body that torch can trace through."""
    if find(target) is not None:
        return True
    name = target.name() if isinstance(target, torch._ops.OpOverload) else qualified_name(target)
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def names_of(target: Any) -> tuple[str, ...]:
    """The names that a target may be registered under, most specific first."""
    if isinstance(target, str):
        return (target.strip("_") if target.startswith("__") else target,)
    if operator_name := qualified_name(target):
        return _overload_names(*operator_name.split("::"), getattr(target, "_overloadname", "default"))
    if isinstance(target, torch._ops.HigherOrderOperator):
        return (f"hop::{target.name()}",)
    name = getattr(target, "__name__", str(target))
    if getattr(operator, name, None) is target:
        return (_OPERATOR_NAMES.get(name, name.strip("_")),)
    if getattr(torch._C._nn, name, None) is target or getattr(torch.nn.functional, name, None) is target:
        return (f"F.{name}", name) if hasattr(torch, name) else (f"F.{name}",)  # F.unfold is not Tensor.unfold
    if isinstance(target, types.FunctionType) and not target.__module__.startswith(_NAMING_MODULES):
        return (f"{target.__module__}.{name}",)  # torch.masked.sum is not torch.sum
    return (name.removeprefix("special_") if name.startswith("special_") else name,)


# Modules whose Python functions go by their bare name.
_NAMING_MODULES = ("torch.functional", "torch._tensor", "pure_backend.")


_OPERATOR_NAMES = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "inv": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "ifloordiv": "floor_divide_",
    "imod": "remainder_",
    "ipow": "pow_",
    "iand": "bitwise_and_",
    "ior": "bitwise_or_",
    "ixor": "bitwise_xor_",
    "imatmul": "matmul_",
}


def _overload_names(namespace: str, name: str, overload: str) -> tuple[str, ...]:
    if namespace == "prims":
        return (f"prims::{name}", name)
    if namespace != "aten":
        return (f"{namespace}::{name}",)
    names = [f"aten::{name}.{overload}", f"aten::{name}"]
    if name.endswith("_copy"):
        name = name.removesuffix("_copy")
        names += [f"aten::{name}.{overload}", f"aten::{name}"]
    return (*names, name)
