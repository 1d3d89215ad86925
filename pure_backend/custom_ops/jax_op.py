"""`jax_op`: a JAX or Pallas function as a torch operator.

The operator is functional: it returns new tensors. It runs eagerly on any tensor, is one node of a captured graph, and inside
`assume_pure` it is the JAX function itself. Its gradient is the function's. An operator that writes (`mutates_args`) is made of
a functional one and a `copy_` of each result into its argument, so that torch's rules for writes hold for it as for any other.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from pure_backend.custom_ops.donation import donated_tensors
from pure_backend.custom_ops.flat import FlatFunction, runs_here, shapes_of
from pure_backend.custom_ops.flat_op import Derivable, content_of, register_kernels
from pure_backend.custom_ops.parameters import Parameters, Structure
from pure_backend.ir.describe import describe_tensor
from pure_backend.ir.donors import check_valid, donated_arguments, give_away
from pure_backend.ir.opaque import opaque
from pure_backend.jax_bridge.donation import donate_buffer
from pure_backend.jax_bridge.lowerings import lowers
from pure_backend.jax_bridge.lowerings.registry import Site, updates


def jax_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: Iterable[str] = (),
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    schema: str | None = None,
) -> Any:
    """Make a torch operator of a JAX function.

    Args:
        name: `"namespace::operator"`.
        fn: A function of `jax.Array`s and static values, every parameter annotated: `jax.Array`, `jax.Array | None`,
            `list[jax.Array]`, int, float, bool, str (or optional, or tuples of them), a dtype, an Enum or a Literal. It
            returns an array, a tuple of arrays, or a list. Left out, `jax_op(name)` is a decorator.
        mutates_args: Parameters that the operator writes. `fn` then returns the new value of each first, in this order, and
            the operator returns the rest.
        donate_argnums: Positions of parameters whose memory the operator may reuse: they are invalid after the call. On `xla`
            tensors the buffer is handed over; plain tensors keep theirs, since JAX does not own it.
        donate_argnames: The same by name.
        static_argnames: Names that must be static; arrays among them are an error. The others follow from the annotations.
        schema: Torch's schema, if the annotations do not say it, as `"(Tensor x, int n) -> Tensor"`.

    Returns:
        A `CustomOpDef` to call; also `torch.ops.namespace.operator`.

    Raises:
        ValueError: The name is not `namespace::operator`, or a named parameter does not exist.
        TypeError: An annotation is missing or cannot be said in a schema.

    Example:
        >>> @jax_op("doc::scaled")
        ... def scaled(x: jax.Array, by: float = 2.0) -> jax.Array:
        ...     return x * by
        >>> scaled(torch.ones(2))
        tensor([2., 2.])
    """
    if name.count("::") != 1 or not all(part.isidentifier() for part in name.split("::")):
        raise ValueError(f"jax_op: the name must be 'namespace::operator', got {name!r}")

    def define(function: Callable[..., Any]) -> CustomOpDef | InPlaceOp:
        parameters = Parameters.of(name, function)
        donated = _donated(parameters, donate_argnums, donate_argnames)
        _check_names(parameters, "static_argnames", _names(static_argnames), among=[p.name for p in parameters.each])
        for static in set(_names(static_argnames)) & set(parameters.arrays()):
            raise ValueError(f"{name}: static_argnames has {static!r}, which is annotated as an array")
        mutated = tuple(mutates_args)
        _check_names(parameters, "mutates_args", mutated, among=parameters.arrays())
        if mutated:
            return InPlaceOp(name, function, parameters, mutated, schema)
        return CustomOpDef(name, function, parameters, donated, schema)

    return define if fn is None else define(fn)


class _Operator:
    """What both sorts of operators have: a schema in torch's library, and a check of a call's arguments."""

    def __init__(self, name: str, parameters: Parameters, schema: str | None, returns: Any, mutated: tuple[str, ...]) -> None:
        self.name = name
        self.parameters = parameters
        namespace, self._operator = name.split("::")
        self._library = torch.library.Library(namespace, "FRAGMENT")
        schema = schema or parameters.schema(returns, mutated)
        self._library.define(f"{self._operator}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        self._opoverload = getattr(getattr(torch.ops, namespace), self._operator).default

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator.

        Raises:
            TypeError: An argument is missing, or there is one too many.
        """
        self.parameters.check(args, kwargs)
        return self._opoverload(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<jax_op {self._opoverload._schema}>"


class CustomOpDef(_Operator):
    """A functional operator made of a JAX function.

    Attributes:
        name: `"namespace::operator"`.
        parameters: The function's parameters.
        donated: Names of the parameters whose memory it may reuse.
    """

    def __init__(
        self, name: str, fn: Callable[..., Any], parameters: Parameters, donated: tuple[str, ...], schema: str | None
    ) -> None:
        super().__init__(name, parameters, schema, parameters.returns, ())
        self.donated = donated
        self._fn = fn
        self._own_vjp: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._called = False
        self._flat = Derivable(self._library, self._operator, self._function, self._dispatch)
        register_kernels(name, self._library, self._run, self._run_without_gradient, self._fake, self._batched)
        lowers(name, content=self._content)(self._lowering)
        self._flat.define_first_derived()
        if donated:
            donated_arguments[name] = tuple(i for i, p in enumerate(parameters.each) if p.name in donated)

    def register_vjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Give the function a gradient of its own, for a kernel that JAX cannot differentiate; before the first call.

        Args:
            forward: `forward(*args) -> (outputs, residuals)`, with the function's own parameters.
            backward: `backward(residuals, cotangents) -> gradients`: one for each array, in the order of the parameters,
                None for those that have none. `cotangents` has the structure of the outputs.

        Raises:
            RuntimeError: The operator was called: the programs of that call have the function's own gradient.
        """
        if self._called:
            raise RuntimeError(
                f"{self.name}: register_vjp must come before the first call: programs of that call have another gradient"
            )
        self._own_vjp = forward, backward

    def _function(self, structure: Structure) -> FlatFunction:
        self._called = True

        def function(*arrays: Any) -> list[Any]:
            args, kwargs = self.parameters.unflatten(structure, arrays)
            return jax.tree.leaves(self._fn(*args, **kwargs))

        return function if self._own_vjp is None else _with_vjp(function, self.parameters, structure, *self._own_vjp)

    def _dispatch(self, structure: Structure, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        args, kwargs = self.parameters.restore(structure, tensors)
        return pytree.tree_leaves(self._opoverload(*args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        tensors, structure = self.parameters.flatten(args, kwargs)
        check_valid(tensors, self.name, lambda: self.parameters.names(structure))
        if not self.donated or not runs_here(tensors):
            return self._shaped(self._flat.run(structure, tensors))
        donated = donated_tensors(self.name, self.donated, tensors, self.parameters.names(structure))
        results = self._flat.run(structure, tensors)
        for tensor in donated:
            if donate_buffer(tensor):
                give_away(tensor)
        return self._shaped(results)

    def _run_without_gradient(self, *args: Any, **kwargs: Any) -> Any:
        tensors, structure = self.parameters.flatten(args, kwargs)
        return self._shaped(self._flat.run_without_gradient(structure, tensors))

    def _shaped(self, results: Sequence[Any]) -> Any:
        if self.parameters.returns is torch.Tensor:
            return results[0]
        return list(results) if self.parameters.returns == list[torch.Tensor] else tuple(results)

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        tensors, structure = self.parameters.flatten(args, kwargs)
        return self._shaped(shapes_of(self._function(structure), tensors))

    def _lowering(self, site: Site, *args: Any, **kwargs: Any) -> Any:
        arrays, structure = self.parameters.flatten(args, kwargs)
        return self._shaped(self._function(structure)(*arrays))

    def _content(self, platform: str, *args: Any, **kwargs: Any) -> str:
        tensors, structure = self.parameters.flatten(args, kwargs)
        return content_of(self._function(structure), tensors, platform)

    def _batched(self, info: Any, in_dims: tuple, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        tensors, structure = self.parameters.flatten(args, kwargs)
        dims = self.parameters.dims(structure, in_dims)
        results = self._flat.batched(structure, dims, info.batch_size, tensors)
        return self._shaped(results), self._shaped([0] * len(results))


class InPlaceOp(_Operator):
    """An operator that writes its arguments: a functional one, `<name>functional`, and a `copy_` of its first results.

    Attributes:
        name: `"namespace::operator"`.
        functional: The operator that it is made of.
        mutated: Names of the parameters that it writes.
    """

    def __init__(
        self, name: str, fn: Callable[..., Any], parameters: Parameters, mutated: tuple[str, ...], schema: str | None
    ) -> None:
        self.returned = _returned_after(name, parameters.returns, len(mutated))
        super().__init__(name, parameters, schema, self.returned, mutated)
        self.mutated = mutated
        self.functional = CustomOpDef(f"{name.removesuffix('_')}_functional", fn, parameters, (), None)
        self._library.impl(self._operator, opaque(self._run), "CompositeImplicitAutograd")
        lowers(name, content=self.functional._content)(updates(functools.partial(self._lowering)))

    def register_vjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """The gradient of the functional operator, see `CustomOpDef.register_vjp`."""
        self.functional.register_vjp(forward, backward)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        tensors, structure = self.parameters.flatten(args, kwargs)
        written = dict(zip(self.parameters.names(structure), tensors, strict=True))
        results = self.functional(*args, **kwargs)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        for name, new in zip(self.mutated, results, strict=False):
            _check_written(self.name, name, written[name], new)
            written[name].copy_(new)
        return self._shaped(results[len(self.mutated) :])

    def _shaped(self, rest: list[Any]) -> Any:
        if self.returned is None:
            return None
        return rest[0] if self.returned is torch.Tensor else tuple(rest)

    def _lowering(self, site: Site, *args: Any, **kwargs: Any) -> tuple:
        arrays, structure = self.parameters.flatten(args, kwargs)
        results = self.functional._function(structure)(*arrays)
        names = self.parameters.names(structure)
        new = [results[self.mutated.index(names[position])] for position in site.writes]
        return (self._shaped(list(results[len(self.mutated) :])), *new)


def _returned_after(name: str, returns: Any, count: int) -> Any:
    """The return annotation without the first results, which are written."""
    parts = () if returns == list[torch.Tensor] else typing.get_args(returns) or (torch.Tensor,)
    if len(parts) < count:
        raise TypeError(f"{name}: mutates {count} arguments, so the function must return a tuple with their new values first")
    rest = parts[count:]
    return None if not rest else rest[0] if len(rest) == 1 else tuple[rest]  # type: ignore[valid-type]


def _check_written(op: str, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise ValueError(
            f"{op}: the new value of argument {name!r} is {describe_tensor(new)}, the argument {describe_tensor(old)}: "
            "an in-place operator returns the whole new value"
        )


def _with_vjp(
    function: FlatFunction,
    parameters: Parameters,
    structure: Structure,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> FlatFunction:
    trees: dict[str, Any] = {}

    def apply_forward(*arrays: Any) -> tuple[list[Any], Any]:
        args, kwargs = parameters.unflatten(structure, arrays)
        outputs, residuals = forward(*args, **kwargs)
        leaves, trees["outputs"] = jax.tree.flatten(outputs)
        return leaves, (residuals, arrays)

    def apply_backward(saved: Any, cotangents: list[Any]) -> tuple:
        residuals, arrays = saved
        grads = backward(residuals, jax.tree.unflatten(trees["outputs"], cotangents))
        grads = jax.tree.leaves(grads if isinstance(grads, tuple) else (grads,), is_leaf=lambda leaf: leaf is None)
        return tuple(_gradient(grad, array) for grad, array in zip(grads, arrays, strict=True))

    applied = jax.custom_vjp(lambda *arrays: function(*arrays))
    applied.defvjp(apply_forward, apply_backward)
    return applied


def _gradient(grad: Any, array: Any) -> Any:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return np.zeros(array.shape, jax.dtypes.float0)
    return jnp.zeros_like(array) if grad is None else grad.astype(array.dtype)


def _donated(parameters: Parameters, argnums: Any, argnames: Any) -> tuple[str, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
    for number in numbers:
        if not -len(parameters.each) <= number < len(parameters.each):
            raise ValueError(f"{parameters.op}: donate_argnums has {number}, there are {len(parameters.each)} parameters")
    names = tuple(dict.fromkeys([parameters.each[n].name for n in numbers] + list(_names(argnames))))
    _check_names(parameters, "donate_argnums/donate_argnames", names, among=parameters.arrays())
    return names


def _names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def _check_names(parameters: Parameters, what: str, names: Iterable[str], among: Sequence[str]) -> None:
    for name in names:
        if name not in among:
            raise ValueError(f"{parameters.op}: {what} has {name!r}; choose from {list(among)}")
