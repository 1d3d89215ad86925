"""`call_jax`: any JAX function on torch tensors, with gradients, inside and outside of compiled functions.

Each call is the operator `pure_backend::call_jax(Tensor[] tensors, str call)`. Its text stands for the function by content
(code, defaults, closure, the globals it names) and for the structure of the arguments; a function object that is made anew is
not traced anew.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch._dynamo.comptime import comptime

from pure_backend.custom_ops.flat_op import FlatOp
from pure_backend.custom_ops.parameters import encode
from pure_backend.ir.exact import Same, exact
from pure_backend.jax_bridge.avals import to_jax_dtype
from pure_backend.jax_bridge.trace import tracing
from pure_backend.transforms.dynamo import callable_in


def call_jax(jax_fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
    """`jax_fn(*args, **kwargs)` on torch tensors.

    Args:
        jax_fn: A function of pytrees (tuples, lists, dicts) of arrays and static values.
        args: Its arguments, tensors in the place of arrays. What is no tensor is static and has to be hashable.
        kwargs: Its keyword arguments.

    Returns:
        Its results, tensors in the place of arrays. Gradients are JAX's, of any order.

    Raises:
        TypeError: `args` is no tuple, or a static argument cannot be hashed.

    Example:
        >>> import jax.numpy as jnp
        >>> call_jax(jnp.add, (torch.ones(2), 1))
        tensor([2., 2.])
    """
    if not isinstance(args, tuple):
        raise TypeError(f"call_jax: args must be a tuple of the function's arguments, got {type(args).__name__}")
    tensors: list[torch.Tensor] = []
    structure = _structure((args, kwargs or {}), tensors)
    if torch.compiler.is_dynamo_compiling():
        comptime(_note_traced)
        call = _call_traced(structure)
        if not call:
            return _call_in_eager(jax_fn, args, kwargs)
    else:
        call = _call(jax_fn, structure)
    return _dispatched(call, tensors)


def _dispatched(call: str, tensors: list[torch.Tensor]) -> Any:
    results = _result_structure(call, tuple((tuple(t.shape), t.dtype) for t in tensors))
    return _filled(results, torch.ops.pure_backend.call_jax(tensors, call))


def _structure(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree as tuples, tensors by number: `("tuple", ("tensor", 0), ("static", 2.0))`."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return ("tensor", len(tensors) - 1)
    if isinstance(tree, tuple):
        return ("tuple", *[_structure(part, tensors) for part in tree])
    if isinstance(tree, list):
        return ("list", *[_structure(part, tensors) for part in tree])
    if isinstance(tree, dict):
        return ("dict", tuple(tree), *[_structure(part, tensors) for part in tree.values()])
    return ("static", tree)


def _filled(structure: Any, tensors: Any) -> Any:
    """The inverse of `_structure`."""
    kind, *parts = structure
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "static":
        return parts[0]
    if kind == "dict":
        return {key: _filled(part, tensors) for key, part in zip(parts[0], parts[1:], strict=True)}
    filled = [_filled(part, tensors) for part in parts]
    return tuple(filled) if kind == "tuple" else filled


@dataclasses.dataclass(frozen=True)
class _Known:
    function: Callable[..., Any]
    structure: Any


_known: dict[str, _Known] = {}
_names: dict[Any, str] = {}
_lock = threading.Lock()
_LIMIT = 4096


def _call(jax_fn: Callable[..., Any], structure: Any) -> str:
    """The text that stands for a function and the structure of its arguments."""
    key = (_content(jax_fn), exact(structure))
    with _lock:
        name = _names.get(key)
        if name is None:
            while len(_names) >= _LIMIT:
                _known.pop(_names.pop(next(iter(_names))), None)
            _serial[0] += 1
            name = _names[key] = encode(f"{getattr(jax_fn, '__name__', 'function')} {_serial[0]}")
            _known[name] = _Known(jax_fn, structure)
        return name


_serial = [0]
_traced = threading.local()


def _note_traced(context: Any) -> None:
    """Remember the function that Dynamo sees a call of, for `_call_traced`."""
    _traced.function = callable_in(context, "jax_fn")


@torch.compiler.assume_constant_result
def _call_traced(structure: Any) -> str:
    """`_call` of the function that was noted last; empty where Dynamo cannot know it."""
    return _call(_traced.function, structure) if _traced.function else ""


_call_in_eager = torch.compiler.disable(call_jax, reason="call_jax: the function holds what is known at run time only")


@torch.compiler.assume_constant_result
def _result_structure(call: str, shapes: Any) -> Any:
    """The structure of the results for arguments of these shapes and dtypes."""
    return _result_of(call, shapes)


@functools.lru_cache(maxsize=4096)
def _result_of(call: str, shapes: Any) -> Any:
    avals = [jax.ShapeDtypeStruct(tuple(map(int, shape)), to_jax_dtype(dtype)) for shape, dtype in shapes]
    with tracing():
        results = jax.eval_shape(lambda *arrays: _apply(call, arrays), *avals)
    leaves, tree = jax.tree.flatten(results)
    return _numbered(jax.tree.unflatten(tree, range(len(leaves))))


def _numbered(tree: Any) -> Any:
    """The structure of a tree whose leaves are the numbers of tensors."""
    if isinstance(tree, int):
        return ("tensor", tree)
    if isinstance(tree, dict):
        return ("dict", tuple(tree), *map(_numbered, tree.values()))
    if isinstance(tree, (tuple, list)):
        return ("list" if isinstance(tree, list) else "tuple", *map(_numbered, tree))
    if tree is None:
        return ("static", None)
    raise TypeError(
        f"call_jax: a result is a {type(tree).__name__}; JAX functions called from torch return tuples, lists, dicts"
    )


def _apply(call: str, arrays: Any) -> Any:
    known = _known[call]
    args, kwargs = _filled(known.structure, arrays)
    return known.function(*args, **kwargs)


def _flat_function(call: str) -> Callable[..., list[Any]]:
    return lambda *arrays: jax.tree.leaves(_apply(encode(call), arrays))


_library = torch.library.Library("pure_backend", "FRAGMENT")
_op = FlatOp(_library, "call_jax", _flat_function)
_op.define_first_derived()


def _content(function: Any) -> Any:
    """What a function does, for comparison: its code and what it holds. Another callable counts as the object that it is."""
    if isinstance(function, functools.partial):
        return ("partial", _content(function.func), _held(function.args), _held(function.keywords))
    if not isinstance(function, types.FunctionType):
        return ("object", Same(function))
    cells = tuple(_held(cell.cell_contents) for cell in function.__closure__ or ())
    read = tuple((name, Same(value) if callable(value) else _held(value)) for name, value in _globals_of(function))
    return (function.__code__, read, _held(function.__defaults__), _held(function.__kwdefaults__), cells)


def _globals_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The globals that a function, or one defined in it, names."""
    names, codes = set(), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]


def _held(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return _content(value)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_held, value))
    if isinstance(value, dict):
        return tuple((exact(key), _held(part)) for key, part in value.items())
    return exact(value) if isinstance(value, (int, float, complex, str, bytes, type(None))) else Same(value)
