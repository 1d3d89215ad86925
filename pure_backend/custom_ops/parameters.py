"""A JAX function's parameters: arrays or static values, and torch's schema for them."""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import enum
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from pure_backend.jax_bridge.avals import to_jax_dtype, to_torch_dtype

_ARRAY, _OPTIONAL, _ARRAYS, _STATIC = "array", "optional", "arrays", "static"
_SEQUENCES = (list, tuple, collections.abc.Sequence)
_DTYPES = (torch.dtype, np.dtype, jax.typing.DTypeLike)
_ALLOWED = (
    "jax.Array, jax.Array | None, list[jax.Array], int, float, bool, str, their optional forms and tuples, a dtype, "
    "an Enum or a Literal"
)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a JAX function.

    Attributes:
        name: Its name.
        kind: Whether it takes an array, an array or None, a list of arrays, or a static value.
        annotation: What torch's schema is inferred from.
        default: Its default, or `inspect.Parameter.empty`.
        keyword: Whether it is given by keyword only.
        to_jax: What turns torch's value of a static argument into what the function expects.
    """

    name: str
    kind: str
    annotation: Any
    default: Any
    keyword: bool
    to_jax: Callable[[Any], Any]


Structure = tuple[Any, ...]
"""What a call gives for each parameter, but for the tensors: True or False for an array that is there or None, the length of a
list of arrays, or the static value."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a JAX function.

    Attributes:
        op: The operator's name, for messages.
        each: In order.
        returns: Torch's return annotation.
    """

    op: str
    each: tuple[Parameter, ...]
    returns: Any

    @classmethod
    def of(cls, op: str, fn: Callable[..., Any]) -> Parameters:
        """Read the annotations of a function.

        Raises:
            TypeError: A parameter has no annotation, or one that no schema can say.
        """
        bound = set(fn.keywords) if isinstance(fn, functools.partial) else set()
        inner = fn
        while isinstance(inner, functools.partial):
            inner = inner.func
        found = inspect.signature(fn, eval_str=True) if inner is fn else _partial_signature(fn, inner)
        parameters = [p for p in found.parameters.values() if p.name not in bound]
        return cls(op, tuple(_parameter(op, i, p) for i, p in enumerate(parameters)), _returned(op, found.return_annotation))

    def schema(self, returns: Any, mutated: tuple[str, ...]) -> str:
        """Torch's schema of an operator with these parameters that returns and writes such things."""
        inferred = torch.library.infer_schema(self._prototype(returns), mutates_args=mutated)
        for p in self.each:
            if isinstance(p.default, (tuple, list)):
                inferred = inferred.replace(f'{p.name}="{_spelled(p.default)}"', f"{p.name}={_spelled(p.default)}")
        return inferred

    def _prototype(self, returns: Any) -> Callable[..., Any]:
        """A function with torch's annotations, for `torch.library.infer_schema`."""

        def function(*args: Any, **kwargs: Any) -> Any: ...

        keyword, plain = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            inspect.Parameter(p.name, keyword if p.keyword else plain, default=_spelled(p.default), annotation=p.annotation)
            for p in self.each
        ]
        function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
        return function

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Whether every parameter has one argument.

        Raises:
            TypeError: One has none, or there are arguments without a parameter.
        """
        names = [p.name for p in self.each]
        unknown = [name for name in kwargs if name not in names[len(args) :]]
        if len(args) > len(names) or unknown:
            raise TypeError(f"{self.op}() takes {names}; got {len(args)} positional arguments and {sorted(kwargs)}")
        missing = [p.name for p in self.each[len(args) :] if p.name not in kwargs and p.default is inspect.Parameter.empty]
        if missing:
            raise TypeError(f"{self.op}() is missing {', '.join(map(repr, missing))}; it takes {names}")

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Structure]:
        """The tensors of a call, and the rest of it."""
        tensors: list[torch.Tensor] = []
        structure = []
        for i, parameter in enumerate(self.each):
            value = args[i] if i < len(args) else kwargs.get(parameter.name, parameter.default)
            structure.append(_flattened(parameter, value, tensors))
        return tensors, tuple(structure)

    def unflatten(self, structure: Structure, arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the JAX function."""
        return self._filled(structure, arrays, lambda parameter, value: parameter.to_jax(value))

    def restore(self, structure: Structure, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the operator."""
        return self._filled(structure, tensors, lambda parameter, value: value)

    def _filled(
        self, structure: Structure, values: Sequence[Any], static: Callable[[Parameter, Any], Any]
    ) -> tuple[list, dict]:
        remaining = iter(values)
        args, kwargs = [], {}
        for parameter, part in zip(self.each, structure, strict=True):
            if parameter.kind in (_ARRAY, _OPTIONAL):
                value = next(remaining) if part else None
            elif parameter.kind == _ARRAYS:
                value = [next(remaining) for _ in range(part)]
            else:
                value = static(parameter, part)
            if parameter.keyword:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return args, kwargs

    def names(self, structure: Structure) -> list[str]:
        """For each tensor of a call the parameter that it was given for."""
        counts = [
            part if p.kind == _ARRAYS else int(bool(part)) if p.kind != _STATIC else 0
            for p, part in zip(self.each, structure, strict=True)
        ]
        return [p.name for p, count in zip(self.each, counts, strict=True) for _ in range(count)]

    def dims(self, structure: Structure, in_dims: Sequence[Any]) -> list[int | None]:
        """The batch dimension of each tensor of a call; None, or no entry at all, is a tensor without one."""
        found: list[int | None] = []
        for i, (parameter, part) in enumerate(zip(self.each, structure, strict=True)):
            given = in_dims[i] if i < len(in_dims) else None
            if parameter.kind == _ARRAYS:
                found += [None] * part if given is None else given
            elif parameter.kind != _STATIC and part:
                found.append(given)
        return found

    def arrays(self) -> list[str]:
        """The names of the parameters that take arrays."""
        return [p.name for p in self.each if p.kind != _STATIC]


def _spelled(default: Any) -> Any:
    """A default as `infer_schema` takes it: lists, which it does not know, as the text that schemas have for them."""
    return str(list(default)) if isinstance(default, (tuple, list)) else default


def _flattened(parameter: Parameter, value: Any, tensors: list[torch.Tensor]) -> Any:
    if parameter.kind == _STATIC:
        if isinstance(value, int) and isinstance(parameter.default, torch.dtype):
            return parameter.default  # torch fills in defaults of dtypes as numbers
        return tuple(value) if isinstance(value, list) else value
    if parameter.kind == _ARRAYS:
        tensors.extend(value)
        return len(value)
    if value is None:
        return False
    tensors.append(value)
    return True


def _partial_signature(fn: Any, inner: Callable[..., Any]) -> inspect.Signature:
    found = inspect.signature(inner, eval_str=True)
    left = set(inspect.signature(fn).parameters)
    return found.replace(parameters=[p for p in found.parameters.values() if p.name in left])


def _parameter(op: str, index: int, parameter: inspect.Parameter) -> Parameter:
    where = f"{op}: parameter {index} ({parameter.name!r})"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise TypeError(f"{where} is *args or **kwargs, for which torch has no schema: name every parameter")
    if parameter.annotation is parameter.empty:
        raise TypeError(f"{where} has no annotation; one of {_ALLOWED} says what it takes")
    kind, annotation, to_jax = _read(where, parameter.annotation)
    keyword = parameter.kind is parameter.KEYWORD_ONLY
    if keyword and kind != _STATIC:
        raise TypeError(f"{where} is an array that is given by keyword only, for which torch keeps no gradient: drop the '*'")
    if kind == _ARRAYS and parameter.default is not parameter.empty:
        raise TypeError(f"{where} is a list of arrays with a default, for which torch has no schema: drop the default")
    return Parameter(parameter.name, kind, annotation, _torch_default(annotation, parameter.default), keyword, to_jax)


def _read(where: str, annotation: Any) -> tuple[str, Any, Callable[[Any], Any]]:
    inner, optional = _without_none(annotation)
    if _is_array(inner):
        return (_OPTIONAL, torch.Tensor | None, _same) if optional else (_ARRAY, torch.Tensor, _same)
    if _is_sequence_of(inner, _is_array):
        if optional:
            raise TypeError(f"{where} is an optional list of arrays, for which torch has no schema: give an empty list")
        return _ARRAYS, Sequence[torch.Tensor], _same
    static, to_jax = _read_static(where, annotation, inner)
    return _STATIC, static | None if optional else static, (lambda v: None if v is None else to_jax(v)) if optional else to_jax


def _read_static(where: str, annotation: Any, inner: Any) -> tuple[Any, Callable[[Any], Any]]:
    if inner in (int, float, bool, str):
        return inner, _same
    if any(inner is dtype for dtype in _DTYPES) or inner == jax.typing.DTypeLike:
        return torch.dtype, to_jax_dtype
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return str, lambda name: inner[name]
    if typing.get_origin(inner) is typing.Literal:
        return type(typing.get_args(inner)[0]), _same
    for kind in (int, float, bool):
        if _is_sequence_of(inner, lambda part, kind=kind: part is kind):
            return Sequence[kind], tuple  # type: ignore[valid-type]
    raise TypeError(f"{where} is annotated {annotation!r}; a schema can say {_ALLOWED}")


def _same(value: Any) -> Any:
    return value


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if annotation == jax.typing.DTypeLike:  # itself a union
        return annotation, False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        if len(parts) == 1 and len(typing.get_args(annotation)) == 2:
            return parts[0], True
    return annotation, False


def _is_array(annotation: Any) -> bool:
    return annotation in (jax.Array, torch.Tensor) or annotation == jax.typing.ArrayLike


def _is_sequence_of(annotation: Any, accepts: Callable[[Any], bool]) -> bool:
    parts = [part for part in typing.get_args(annotation) if part is not Ellipsis]
    return typing.get_origin(annotation) in _SEQUENCES and bool(parts) and all(map(accepts, parts))


def _returned(op: str, annotation: Any) -> Any:
    """Torch's return annotation: a tensor, a tuple of so many tensors, or a list of tensors."""
    if _is_array(annotation):
        return torch.Tensor
    parts = typing.get_args(annotation)
    if _is_sequence_of(annotation, _is_array):
        if typing.get_origin(annotation) is tuple and Ellipsis not in parts:
            return tuple[(torch.Tensor,) * len(parts)]  # type: ignore[misc]
        return list[torch.Tensor]
    raise TypeError(f"{op}: the return annotation is {annotation!r}; it must be jax.Array, a tuple of them, or list[jax.Array]")


def _torch_default(annotation: Any, default: Any) -> Any:
    if isinstance(default, enum.Enum):
        return default.name
    if annotation in (torch.dtype, torch.dtype | None) and default is not None and default is not inspect.Parameter.empty:
        return default if isinstance(default, torch.dtype) else to_torch_dtype(default)
    return default


def encode(static: Any) -> str:
    """The static part of a call as text, for an operator's `str` argument."""
    return repr(_plain(static))


def decode(text: str) -> Any:
    """What `encode` was given."""
    return _restored(ast.literal_eval(text))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return ("tuple", *map(_plain, value))
    if isinstance(value, torch.dtype):
        return ("dtype", str(value).removeprefix("torch."))
    if isinstance(value, float) and not math.isfinite(value):
        return ("float", repr(value))
    return value


def _restored(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, *parts = value
    return {"tuple": lambda *p: tuple(map(_restored, p)), "dtype": lambda n: getattr(torch, n), "float": float}[kind](*parts)
