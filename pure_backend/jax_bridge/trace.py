"""FX graph -> JAX function: walk the nodes, lower each, hold the result to torch's own shape and dtype.

A node's target is looked up in our lowerings, then among torchax's JAX functions for ATen operators, then decomposed by torch
into ATen operators that are lowered in the same way. What is left raises `UnsupportedOperatorError`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend import _compat
from pure_backend.errors import ImpureGraphError, LoweringError, PureBackendError, UnsupportedOperatorError
from pure_backend.ir import functional_ops
from pure_backend.ir.describe import describe_node, describe_tensor
from pure_backend.ir.facts import facts, reads_input_scalar
from pure_backend.ir.failures import failure
from pure_backend.ir.impurity import Impurity
from pure_backend.ir.source import user_frame
from pure_backend.jax_bridge import lowerings
from pure_backend.jax_bridge.avals import to_jax_dtype
from pure_backend.jax_bridge.casts import cast
from pure_backend.jax_bridge.decompose import FakeCall, decompose, torch_decomposition
from pure_backend.jax_bridge.frames import naming_line, without_frames
from pure_backend.jax_bridge.lowerings.formulas import has_torch_derivative
from pure_backend.jax_bridge.lowerings.registry import names_of, updates_arguments
from pure_backend.jax_bridge.pallas import kernels_as_written
from pure_backend.jax_bridge.rng import KEY, KeyStream
from pure_backend.jax_bridge.torch_derivative import backward_graph, check_backward, differentiable, with_torch_derivative

_SCALAR_FUNCTIONS = {
    torch.sym_max: jnp.maximum,
    torch.sym_min: jnp.minimum,
    torch.sym_float: lambda x: jnp.asarray(x, jnp.float64),
    torch._sym_sqrt: jnp.sqrt,
}
"""How Dynamo spells functions of Python numbers that may change."""


def trace(gm: fx.GraphModule, avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, bool]:
    """Trace a graph of values.

    Args:
        gm: A functional graph; its output is a flat tuple of tensors.
        avals: One abstract value for each tensor placeholder, in order.

    Returns:
        A closed jaxpr of `(*tensors, key: u32[2]) -> outputs`, and whether it uses the key.

    Raises:
        ImpureGraphError: With every node without a lowering, or with one that fails.
    """
    used = []

    def function(arrays, key):
        walker = Walker(KeyStream(key))
        # Only the outermost graph collects impurities: what fails in a body is told of the node that owns it.
        results = tuple(walker.run(gm, arrays, walker.node_or_impurity))
        if walker.impurities:
            raise ImpureGraphError(walker.impurities)
        used.append(walker.keys.used > 0)
        return results

    with tracing():
        jaxpr = jax.make_jaxpr(function)(list(avals), KEY)
    return jaxpr, used[-1]


@contextlib.contextmanager
def tracing():
    """The scope of every trace: 64-bit types, torch's matmul precision, neither of them in kernels; no Python frames."""
    precision = {"highest": "highest", "high": "high", "medium": "default"}[_compat.float32_matmul_precision()]
    with (
        kernels_as_written(),
        _compat.x64(),
        jax.default_matmul_precision(precision),
        without_frames(),
    ):
        yield


class Walker:
    """Evaluates graphs of values on JAX arrays within one trace.

    Args:
        keys: Of random operators.
        shared: What the walkers of one trace share.
        path: The scope path outside.
        derivatives: Whether operators that torch has another derivative of (`lowerings/formulas.py`) get it: after a check that
            its graph can be lowered, without one (in a backward, which may contain the operator), or not, where nothing is
            differentiated.
    """

    def __init__(
        self,
        keys: KeyStream,
        shared: dict[Any, Any] | None = None,
        path: tuple[str, ...] = (),
        derivatives: Literal["checked", "unchecked", "none"] = "checked",
    ) -> None:
        self.keys = keys
        self.shared = {} if shared is None else shared
        self.path = path
        self.derivatives = derivatives
        self.impurities: list[Impurity] = []

    def body(self, gm: fx.GraphModule, arrays: Sequence[Any], keys: KeyStream | None = None) -> list[Any]:
        """The outputs of a nested graph; with `keys` of its own where it is traced as a function of its own."""
        walker = self if keys is None else Walker(keys, self.shared, self.path)
        return walker.run(gm, arrays)

    def run(self, gm: fx.GraphModule, arrays: Sequence[Any], step: Callable[..., Any] | None = None) -> list[Any]:
        """The outputs of a graph, one per leaf, for the values of its tensor placeholders."""
        step = step or self.node
        remaining = iter(arrays)
        env: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "output":
                return [env.get(leaf, leaf) for leaf in pytree.tree_leaves(node.args[0])]
            elif node.op == "get_attr":
                env[node] = self.constant(gm, node)
            else:
                with self.scope(node):
                    env[node] = step(node, env)
        raise LoweringError("the graph has no output node")

    @contextlib.contextmanager
    def scope(self, node: fx.Node) -> Iterator[None]:
        """The scope path and source line of a node, so that HLO metadata carries them in forward and backward."""
        outer, names = self.path, facts(node).scopes
        opened = names[len(outer) :] if names[: len(outer)] == outer else names  # a body's nodes repeat their owner's path
        self.path = names or outer
        try:
            with (
                naming_line(user_frame(node)),
                jax.named_scope("/".join(opened)) if opened else contextlib.nullcontext(),
            ):
                yield
        finally:
            self.path = outer

    def constant(self, gm: fx.GraphModule, node: fx.Node) -> Any:
        value = getattr(gm, node.target)
        if not isinstance(value, torch.Tensor):
            return value
        exact = value.float() if value.is_floating_point() and value.itemsize < 4 else value  # numpy has no bfloat16
        return jnp.asarray(exact.numpy()).astype(to_jax_dtype(value.dtype))

    def node_or_impurity(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """The value of a node; one that cannot be lowered is noted, and zeros let the walk go on to find all of them."""
        try:
            return self.node(node, env)
        except Exception as error:
            self.impurities.append(failure(node, error))
            return _zeros(node)

    def node(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        try:
            if isinstance(node.target, functional_ops.Functionalized):
                return _recorded(node, self.write(node, node.target, args, kwargs))
            if reads_input_scalar(node):
                return args[0]
            if isinstance(facts(node).value, (int, float)):  # arithmetic on such a scalar
                return _SCALAR_FUNCTIONS.get(node.target, node.target)(*args, **kwargs)
            return _recorded(node, self.call(node, args, kwargs))
        except PureBackendError:
            raise
        except Exception as error:
            raise LoweringError(f"lowering {describe_node(node)}\nfailed: {type(error).__name__}: {error}") from error

    def call(self, node: fx.Node, args: tuple, kwargs: dict) -> Any:
        """A node that writes nothing."""
        if self.derives(node, node.target, facts(node).value):
            return self.derived(node, args, kwargs)
        return self.value(node, args, kwargs)

    def value(self, node: fx.Node, args: tuple, kwargs: dict) -> Any:
        """What a node computes, differentiated as it is computed."""
        site = self.site(node, facts(node).value, node.args)
        lowering = lowerings.find(node.target)
        result = NotImplemented  # also a lowering's answer where it does not know these arguments
        if lowering is not None:
            bound_args, bound_kwargs = _bound(args, kwargs)
            result = lowering(site, *bound_args, **bound_kwargs)
        if result is NotImplemented:
            result = self.decomposed(node, node.target, (args, kwargs), (node.args, node.kwargs), ())
            result = _structured(result, site.out)
        return self.conform(node, result, site.out)

    def derives(self, node: fx.Node, target: Any, results: Any) -> bool:
        """Whether a node has torch's own derivative."""
        return (
            self.derivatives != "none"
            and facts(node).grad
            and has_torch_derivative(target)
            and any(map(differentiable, pytree.tree_leaves(results)))
            and any(differentiable(facts(n).value) for n in node.all_input_nodes)
        )

    def derived(self, node: fx.Node, args: tuple, kwargs: dict) -> Any:
        """What a node computes, with torch's own derivative."""
        call, arrays = _fake_call(node, node.target, args, kwargs)

        def compute(*unique):
            plain = Walker(self.keys, self.shared, self.path, derivatives="none")
            return jax.tree.leaves(plain.value(node, *call.arguments(unique, arrays)))

        @functools.cache
        def graph():
            return backward_graph(call)

        def backward(*values):  # "unchecked": the backward may contain the operator, and a check of it would not end
            return Walker(self.keys, self.shared, derivatives="unchecked").run(graph(), values)

        unique = call.unique(arrays)
        if self.derivatives == "checked" and any(map(_requires_grad, pytree.tree_leaves(facts(node).value))):
            # JAX traces the backward late; what it cannot lower shall be known now.
            check_backward(compute, backward, unique)
        return _structured(list(with_torch_derivative(compute, backward)(*unique)), facts(node).value)

    def write(self, node: fx.Node, target: functional_ops.Functionalized, args: tuple, kwargs: dict) -> tuple:
        """A writing node made a function: `(result, *new values)`."""
        out, *written = facts(node).value
        op, writes = target.op, target.writes
        name = names_of(op)[0]
        lowering = lowerings.find(op)
        base = name.endswith("_") and lowerings.find(name.rstrip("_")) if lowering is None else None
        bound_args, bound_kwargs = _bound(args, kwargs)
        if lowering is not None and updates_arguments(lowering):  # it gives the result and the new values itself
            result, *new = lowering(self.site(node, out, node.args, writes), *bound_args, **bound_kwargs)
            return (self.conform(node, result, out), *self.conform(node, new, written))
        # An operator in place is its functional form: `mul_` is `mul`, whose result is both the result and the new value.
        new = NotImplemented
        real = not isinstance(op, str) or hasattr(torch.Tensor, op)  # an element of a list operator goes by a name of ours
        derived = real and self.derives(node, name.rstrip("_"), written)  # as the functional operator, so decompose
        if len(writes) == 1 and "out" not in kwargs and not derived and (chosen := lowering or base):
            new = chosen(self.site(node, written[0], node.args, writes), *bound_args, **bound_kwargs)
        if new is NotImplemented:
            flat = self.decomposed(node, op, (args, kwargs), (node.args, node.kwargs), writes)
            count = len(flat) - len(writes)
            return (_structured(flat[:count], out), *self.conform(node, flat[count:], written))
        new = self.conform(node, jnp.broadcast_to(new, written[0].shape), written[0])
        return (new, new)

    def site(self, node: fx.Node, out: Any, args: Any, writes: tuple[int, ...] = ()) -> lowerings.Site:
        fakes = fx.map_arg(args, lambda n: facts(n).value)
        return lowerings.Site(node, out, fakes, self.keys, self.body, writes, facts(node).bodies, self.shared)

    def decomposed(self, node: fx.Node, op: Any, args: tuple, fx_args: tuple, writes: tuple[int, ...]) -> list[Any]:
        """The results of an operator through torchax's table or torch's decomposition."""
        if isinstance(op, torch._ops.OpOverload):
            return self.aten(node, op, args, fx_args)
        call, arrays = _fake_call(node, op, *args, writes)
        gm = decompose(call)
        _check_progress(node, gm, op)
        return self.run(gm, call.unique(arrays))

    def aten(self, node: fx.Node, op: Any, args: tuple, fx_args: tuple) -> list[Any]:
        """An ATen operator without a lowering of ours."""
        table = _compat.aten_table()
        known = table.get(op) or table.get(op.overloadpacket)
        if known is not None:
            return jax.tree.leaves(known(*_arrays_for(op, args[0]), **args[1]))
        further = torch_decomposition(op) or (op if op._can_decompose() else None)
        if further is None:
            raise UnsupportedOperatorError(f"no JAX lowering for {describe_node(node)}")
        return self.decomposed(node, _Opaque(further), args, fx_args, ())

    def conform(self, node: fx.Node, result: Any, expected: Any) -> Any:
        """The result with torch's dtypes.

        Raises:
            LoweringError: A shape differs from torch's.
        """
        if expected is None:
            return result
        if isinstance(expected, torch.Tensor):
            return _conform_one(node, result, expected)
        if isinstance(expected, (tuple, list)):
            return tuple(self.conform(node, r, e) for r, e in zip(result, expected, strict=True))
        return result


def _arrays_for(op: torch._ops.OpOverload, args: tuple) -> tuple:
    """Arguments as torchax's function of an operator takes them.

    For a polynomial these are 0-d arrays in the place of numbers (`aten.special_hermite_polynomial_h.n_scalar`), and a degree
    that is no int64 becomes negative, as in torch's C++: torchax's loop would run to the largest integer.
    """
    if "_polynomial_" not in op._schema.name:
        return args
    x, degree = (jnp.asarray(arg, jnp.float32) if isinstance(arg, (int, float)) else arg for arg in args)
    return x, jnp.where(jnp.abs(degree) < 2.0**63, degree, -1)


class _Opaque:
    """A decomposition function, told from an operator so that it is not looked up again."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = f"decomposition of {getattr(fn, '__name__', fn)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.fn, torch._ops.OpOverload):
            return self.fn.decompose(*args, **kwargs)
        return self.fn(*args, **kwargs)


def _conform_one(node: fx.Node, result: Any, expected: torch.Tensor) -> Any:
    result = jnp.asarray(result)
    if tuple(result.shape) != tuple(expected.shape):
        raise LoweringError(
            f"the lowering of {describe_node(node)}\ngave shape {tuple(result.shape)}, torch {describe_tensor(expected)}"
        )
    return cast(result, to_jax_dtype(expected.dtype))


def _recorded(node: fx.Node, result: Any) -> Any:
    """What a node made while autograd was not recording carries no gradient."""
    if facts(node).grad or node.target in (functional_ops.keep_gradient, functional_ops.write_view):
        return result
    return jax.tree.map(lambda leaf: lax.stop_gradient(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, result)


def _zeros(node: fx.Node) -> Any:
    """Zeros in the shape of a node's value."""
    return pytree.tree_map_only(torch.Tensor, lambda t: jnp.zeros(t.shape, to_jax_dtype(t.dtype)), facts(node).value)


def _structured(flat: list[Any], out: Any) -> Any:
    """Flat tensors in the structure of torch's own result."""
    if out is None or isinstance(out, torch.Tensor):
        return flat[0] if flat else None
    leaves, spec = pytree.tree_flatten(out)
    remaining = iter(flat)
    filled = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(filled, spec)


def _bound(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments with torch's first one in first place, whatever it is called, and without those that say nothing here."""
    kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout", "pin_memory", "device")}
    for name in ("input", "self"):
        if name in kwargs:
            args = (kwargs.pop(name), *args)
    if "other" in kwargs and len(args) == 1:
        args = (*args, kwargs.pop("other"))
    return args, kwargs


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _fake_call(node: fx.Node, op: Any, args: tuple, kwargs: dict, writes: tuple[int, ...] = ()) -> tuple[FakeCall, list[Any]]:
    """A node's call on fake tensors, and the arrays that stand for its leaves."""
    leaves, spec = pytree.tree_flatten(fx.map_arg((node.args, node.kwargs), lambda n: facts(n).value))
    arrays = pytree.tree_leaves((args, kwargs))
    leaves = [_scalar_as_tensor(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)]
    return FakeCall(op, tuple(leaves), spec, writes, facts(node).autocast, facts(node).grad), arrays


def _scalar_as_tensor(leaf: Any, array: Any) -> Any:
    """A runtime scalar as a 0-d tensor."""
    if isinstance(array, jax.Array) and not isinstance(leaf, torch.Tensor):
        return torch.empty((), dtype=torch.float64, device="meta")
    return leaf


def _check_progress(node: fx.Node, gm: fx.GraphModule, op: Any) -> None:
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]
    if isinstance(op, _Opaque) and len(calls) == 1 and calls[0].target is node.target:
        raise UnsupportedOperatorError(f"no JAX lowering for {describe_node(node)}")
