"""`options={"verify": True}`: the first call of each specialisation is compared with eager, down to the node that differs.

Compared are outputs, written inputs and, in the first backward, gradients. Where they differ, the graph is walked: each node is
run in eager on the values that eager has there, and lowered alone on the same values, so the first node that gives something
else is the culprit and not a victim. Random operators draw other numbers than eager's, so a program with random nodes is
checked node by node, and those nodes by shape and dtype alone. Eager runs on the CPU for `xla` tensors: torch_xla's own eager
differs from torch in places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend import _compat
from pure_backend.errors import AccuracyError
from pure_backend.fx_passes.functional import Functional, Value
from pure_backend.inspect.reproducer import write_reproducer
from pure_backend.ir.describe import describe_node, describe_tensor, tensor_leaves
from pure_backend.ir.facts import facts, reads_input_scalar
from pure_backend.ir.functional_ops import Functionalized
from pure_backend.ir.modes import AUTOCAST_DEVICES, modes_kept
from pure_backend.jax_bridge.arrays import ArrayViews, to_tensor
from pure_backend.jax_bridge.lowerings.registry import names_of
from pure_backend.jax_bridge.rng import KEY_SHAPE, KeyStream
from pure_backend.jax_bridge.trace import Walker, tracing

_logger = logging.getLogger("pure_backend")

# Largest error of one node, relative to the largest value that it should have. A whole graph adds up such errors.
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_SINGLE, _SINGLE_FAST, _EIGHT_BITS = 3e-5, 1e-2, 0.2
_GRAPH = 5
_CANCELLATION = 16  # units in the last place of the largest input, for sums in which large terms cancel
_UNINITIALIZED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
_COTANGENT_SEED = 0


class Verified:
    """A plan whose first call and first backward are compared with eager; later calls are the plan's own.

    Attributes:
        plan: The plan.
    """

    def __init__(self, plan: Any, gm: fx.GraphModule, functional: Functional, folder: str | PathLike[str] | None) -> None:
        self.plan = plan
        self.folder = folder
        self._check: _Check | None = _Check(plan, gm, functional, folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)

    def __call__(self, args: Sequence[Any]) -> Any:
        """The original graph's outputs.

        Raises:
            AccuracyError: They are not what eager gives.
        """
        check = self._check
        if check is None:
            return self.plan(args)
        result = check(args)
        self._check = None
        return result


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that is not what eager has.

    Attributes:
        what: What it is.
        error: The largest difference, infinite where shapes, dtypes or special values differ.
        text: The difference in words.
        exact: Whether it is of integers, which rounding elsewhere may have moved.
    """

    what: str
    error: float
    text: str
    exact: bool = False


class _Check:
    """The first call of a plan beside eager's."""

    def __init__(self, plan: Any, gm: fx.GraphModule, functional: Functional, folder: Any) -> None:
        self.plan = plan
        self.gm = gm
        self.functional = functional
        self.folder = folder
        nodes = [node for node in functional.gm.graph.nodes if node.op not in ("placeholder", "output")]
        self.comparable = not plan.program.uses_key and not any(map(_is_uninitialized, nodes))
        self.gradients = bool(plan.program.inputs) and torch.is_grad_enabled()

    def __call__(self, args: Sequence[Any]) -> Any:
        eager = _Copies(args)
        before = _Copies(args).passed if self.plan.write_backs else args
        with _random_state_kept(), _autocast_moved() if self.plan.device == "xla" else contextlib.nullcontext():
            want = _run_eagerly(self.gm, eager.passed)
            inputs = [_plain(tensor) for tensor in self.plan.gather(before)[1:]]
        bounds = _Bounds.of(self.functional.gm.graph.nodes, inputs, _GRAPH)
        got = self.plan(args)
        found = list(_compare_calls(got, want, args, eager.passed, self.plan, bounds, self.comparable))
        if not self.comparable:
            self.blame(found, inputs, self.gradients)
        elif found:
            self.blame(found, inputs, False)
        if self.gradients and self.comparable:
            self.watch_backward(got, args, want, eager, inputs)
        return got

    def blame(self, found: list[Difference], inputs: list[torch.Tensor], gradients: bool) -> None:
        """Raise the error of the first node that differs.

        Raises:
            AccuracyError: There is one, or there is none but the whole differs.
        """
        with _random_state_kept():
            culprit = _first_difference(self.functional.gm, inputs, gradients)
        if culprit is not None:
            raise self.error_of(culprit, found)
        if found and not all(difference.exact for difference in found):
            raise AccuracyError(
                f"compiled differs from eager: {_listed(found)}\nno node differs on its own: either rounding adds up, or nodes "
                "are put together wrongly (writes, views)"
            )
        for difference in found:
            _logger.warning("compiled differs from eager, but no node does on its own: %s", difference.text)

    def error_of(self, culprit: _Culprit, found: list[Difference]) -> AccuracyError:
        """The error that names a node, with its reproducer."""
        node, difference = culprit.node, culprit.difference
        folder = self.folder or tempfile.mkdtemp(prefix="pure_backend_verify_")
        path = write_reproducer(folder, node, culprit.args, culprit.kwargs, difference.text)
        lines = [f"compiled differs from eager: {_listed(found)}"] if found else []
        lines += [f"the first node that differs is {node.name} = {describe_node(node)}", difference.text]
        lines += [f"reproducer: {path}" if path else "no reproducer: the node has graphs or views inside"]
        return AccuracyError("\n".join(lines), node=node.name, error=difference.error, reproducer=path)

    # ---------------------------------------------------------------------------------------------- gradients

    def watch_backward(self, got: Any, args: Sequence[Any], want: Any, eager: _Copies, inputs: list[torch.Tensor]) -> None:
        """Compare gradients when the program's node runs backward for the first time."""
        ours = _program_node([*pytree.tree_leaves(got), *args], self.plan.program)
        if ours is None:
            return
        heads = _heads(self.functional, pytree.tree_leaves(want), eager.passed)

        def compare(grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
            given = [(heads.get(i), cotangent) for i, cotangent in enumerate(grad_outputs) if cotangent is not None]
            heads.clear()  # only the first time, and eager's graph is freed
            if given and all(head is not None and head.requires_grad for head, _ in given):
                self.compare_gradients(grad_inputs, given, eager, inputs)

        ours.register_hook(compare)

    def compare_gradients(self, got: Sequence[Any], given: list[tuple[Any, Any]], eager: _Copies, inputs: list) -> None:
        places = {position: self.plan.positions[position - 1] for position in self.plan.program.inputs}
        positions = [position for position, place in places.items() if place in eager.leaves]
        leaves = [eager.leaves[places[position]] for position in positions]
        bounds = _Bounds.of(self.functional.gm.graph.nodes, inputs, _GRAPH)
        with torch.enable_grad(), _random_state_kept(), _no_autocast():
            cotangents = [cotangent.detach().to(head.device) for head, cotangent in given]
            want = torch.autograd.grad([head for head, _ in given], leaves, cotangents, allow_unused=True, retain_graph=True)
        found = []
        for position, grad in zip(positions, want, strict=True):
            what = f"the gradient of input {places[position]}"
            if (grad is None) != (got[position] is None):
                found.append(Difference(what, float("inf"), f"{what} is {_kind(got[position])}, in eager {_kind(grad)}"))
            elif grad is not None and (difference := _compare(what, got[position], grad, bounds)):
                found.append(difference)
        if found:
            self.blame(found, inputs, True)


def _kind(value: Any) -> str:
    return "None" if value is None else describe_tensor(value)


def _listed(found: Sequence[Difference]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0].text + more


def _is_uninitialized(node: fx.Node) -> bool:
    return not isinstance(node.target, Functionalized) and names_of(node.target)[-1] in _UNINITIALIZED


def _heads(functional: Functional, want: Sequence[Any], args: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Eager's tensors by their position among the program's outputs."""
    outputs = zip(functional.outputs, want, strict=True)
    heads = {output.index: leaf for output, leaf in outputs if type(output) is Value}
    return heads | {write_back.index: args[write_back.input] for write_back in functional.write_backs if write_back.recorded}


def _program_node(tensors: Sequence[Any], program: Any) -> Any:
    """The autograd node of this call of a program: the first on each way up from its results."""
    queue = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop(0)
        if getattr(node, "program", None) is program:
            return node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen and type(node).__name__ != "PureFunctionBackward":
                seen.add(parent)
                queue.append(parent)
    return None


# -------------------------------------------------------------------------------------------------- running eager


class _Copies:
    """Copies of a call's arguments: those that share memory share it here too, and gradients stay among them.

    Attributes:
        passed: What to call with.
        leaves: For each argument that requires grad, what to differentiate by.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self.leaves: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        with torch.inference_mode(False), torch.no_grad():
            self.passed = [self._copy(i, a) if isinstance(a, torch.Tensor) else a for i, a in enumerate(args)]

    def _copy(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            self.leaves[i] = _plain(tensor).requires_grad_()
            with torch.enable_grad():
                return self.leaves[i].clone()  # no leaf, so that a write is recorded as it is for a tensor with a history
        if tensor.device.type == "xla" or tensor.is_conj() or tensor.is_neg():
            return _plain(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave torch's generators as they were, so that a verified call draws what any call would."""
    state, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Without the autocast of whoever calls, which a program does not see."""
    with contextlib.ExitStack() as stack:
        for kind in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def _autocast_moved() -> Iterator[None]:
    """With the caller's autocast of `xla` on the CPU, where eager runs for `xla` tensors."""
    enabled, dtype = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
    with torch.autocast("cpu", dtype=dtype) if enabled else torch.autocast("cpu", enabled=False):
        yield


def _run_eagerly(gm: fx.GraphModule, args: Sequence[Any]) -> Any:
    with modes_kept():
        return _OffXla(gm).run(*args)


class _OffXla(fx.Interpreter):
    """Runs a graph with the CPU in the place of `xla` devices, and loops and regions as what they stand for."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        return _eagerly(target)(*args, **kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return _off_xla(args), _off_xla(kwargs)


def _scan(body: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()) -> tuple:
    """`torch.ops.higher_order.scan` as a loop; run bare, torch's own gives wrong gradients."""
    carry, rows = list(init), []
    for i in range(xs[0].shape[0]):
        results = body(*carry, *(x[i] for x in xs), *more)
        carry = list(results[: len(carry)])
        rows.append(results[len(carry) :])
    return (*carry, *(torch.stack(column) for column in zip(*rows, strict=True)))


def _region(body: Callable[..., Any], _: Any, *operands: Any) -> Any:
    """`invoke_subgraph`, which torch runs under its own tracers only."""
    return body(*operands)


_EAGERLY = {"scan": _scan, "invoke_subgraph": _region}


def _eagerly(target: Any) -> Callable[..., Any]:
    """What to call for a node's target in eager."""
    return _EAGERLY.get(target.name(), target) if isinstance(target, torch._ops.HigherOrderOperator) else target


def _off_xla(value: Any) -> Any:
    """Arguments with the CPU in the place of `xla` devices."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_off_xla, value))
    if isinstance(value, dict):
        return {key: _off_xla(part) for key, part in value.items()}
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "xla" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "xla" else value


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without history, on the CPU if it is an `xla` tensor."""
    with torch.inference_mode(False):
        tensor = tensor.detach()
        return tensor.cpu() if tensor.device.type == "xla" else tensor.clone()


# -------------------------------------------------------------------------------------------------- comparing


def _compare_calls(
    got: Any, want: Any, args: Sequence[Any], copies: Sequence[Any], plan: Any, bounds: _Bounds, comparable: bool
) -> Iterator[Difference]:
    pairs = [
        (f"output {i}", *pair) for i, pair in enumerate(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True))
    ]
    pairs += [(f"input {w.input} after the call", args[w.input], copies[w.input]) for w in plan.write_backs]
    for what, ours, eager in pairs:
        if isinstance(eager, torch.Tensor) and (difference := _compare(what, ours, eager, bounds, comparable)):
            yield difference


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """How far values may be off."""

    relative: float
    absolute: float

    @classmethod
    def of(cls, nodes: Iterable[fx.Node], inputs: Any, factor: float = 1) -> _Bounds:
        """Bounds for what these nodes compute from these inputs, by the least precise dtype among them."""
        nodes = [inner for node in nodes for inner in _with_bodies(node)]
        autocast = [dtype for node in nodes for _, dtype in facts(node).autocast]
        fakes = [tensor for node in nodes for tensor in tensor_leaves(facts(node).value) + list(node.meta.get("written", ()))]
        dtypes = {tensor.dtype for tensor in [*fakes, *_tensors(inputs)]} | set(autocast)
        floats = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
        relative = factor * max(map(_tolerance, floats), default=0.0)
        largest = max((float(_for_comparison(t).abs().nan_to_num(0, 0, 0).max()) for t in _floats(inputs)), default=0.0)
        epsilon = 0.0 if relative > 1e-3 else max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
        return cls(relative, factor * _CANCELLATION * epsilon * largest + 1e-3 * relative)


def _with_bodies(node: fx.Node) -> Iterator[fx.Node]:
    """A node and those of the graphs inside it."""
    yield node
    for body in facts(node).bodies:
        for inner in body.graph.nodes:
            yield from _with_bodies(inner)


def _floats(value: Any) -> list[torch.Tensor]:
    return [t for t in _tensors(value) if (t.is_floating_point() or t.is_complex()) and t.numel() and not t.is_meta]


def _compare(what: str, got: torch.Tensor, want: torch.Tensor, bounds: _Bounds, values: bool = True) -> Difference | None:
    """How a tensor differs from eager's, or None if it does not."""
    if got.shape != want.shape or got.dtype != want.dtype:
        text = f"{what} is {describe_tensor(got)}, in eager {describe_tensor(want)}"
        return Difference(what, float("inf"), text)
    if not values or not want.numel() or want.is_meta:
        return None
    ours, eager = _for_comparison(got), _for_comparison(want)
    if not (want.is_floating_point() or want.is_complex()):
        count = int((ours != eager).sum())
        return Difference(what, float(count), f"{what} has {count} other values than in eager", True) if count else None
    special = ~(torch.isfinite(eager) & torch.isfinite(ours))
    if not torch.equal(ours[special].nan_to_num(7.0, 8.0, 9.0), eager[special].nan_to_num(7.0, 8.0, 9.0)):
        return Difference(what, float("inf"), f"{what} has NaN or infinity in other places than eager")
    ours, eager = ours[~special], eager[~special]
    if not ours.numel():
        return None
    error, allowed = float((ours - eager).abs().max()), bounds.absolute + bounds.relative * float(eager.abs().max())
    return Difference(what, error, f"{what} is off by up to {error:.3g}; {allowed:.3g} is allowed") if error > allowed else None


def _for_comparison(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _tolerance(dtype: torch.dtype) -> float:
    if dtype in (torch.float32, torch.complex64):
        return _SINGLE if _compat.float32_matmul_precision() == "highest" else _SINGLE_FAST
    return _TOLERANCE.get(dtype, _EIGHT_BITS)


# -------------------------------------------------------------------------------------------------- walking nodes


@dataclasses.dataclass(frozen=True)
class _Culprit:
    """A node that alone differs from eager, with eager's arguments."""

    node: fx.Node
    difference: Difference
    args: tuple
    kwargs: dict


def _first_difference(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], gradients: bool) -> _Culprit | None:
    """The first node of a functional graph whose lowering, on eager's values, does not give eager's result."""
    remaining = iter(inputs)
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            return None
        if node.op == "placeholder":
            env[node] = next(remaining) if isinstance(facts(node).value, torch.Tensor) else facts(node).value
        elif node.op == "get_attr":
            env[node] = getattr(gm, str(node.target))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            one = _OneNode(node, env)
            env[node] = one.in_torch(args, kwargs)
            if (difference := one.compare(env[node], gradients)) is not None:
                return _Culprit(node, difference, args, kwargs)
    return None


class _OneNode:
    """One node with the values that eager has for its inputs, in torch and in JAX."""

    def __init__(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        self.node = node
        self.values = {arg: env[arg] for arg in node.all_input_nodes}
        known = facts(node)
        self.bounds = _Bounds.of([node], list(self.values.values()))
        self.inputs = [arg for arg, value in self.values.items() if isinstance(value, (torch.Tensor, tuple, list, float))]
        self.differentiable = [
            arg for arg in self.inputs if known.grad and _requires_grad(arg) and isinstance(self.values[arg], torch.Tensor)
        ]

    def in_torch(self, args: Any, kwargs: Any) -> Any:
        """Eager's value."""
        known, node = facts(self.node), self.node
        args, kwargs = _off_xla(args), _off_xla(kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(modes_kept())
            stack.enter_context(_no_autocast())
            for kind, dtype in known.autocast:
                stack.enter_context(torch.autocast(_off_xla(kind), dtype=dtype, cache_enabled=False))
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return _eagerly(node.target)(*args, **kwargs)

    def compare(self, want: Any, gradients: bool) -> Difference | None:
        """How the node's lowering differs from eager."""
        if reads_input_scalar(self.node) or not _tensors(want):
            return None
        arrays, draws = self.in_jax()
        values = not draws and not _is_uninitialized(self.node)
        for i, (array, tensor) in enumerate(zip(arrays, _results(self.node, want), strict=True)):
            what = "its result" if len(arrays) == 1 else f"its result {i}"
            if difference := _compare(what, to_tensor(array), tensor, self.bounds, values):
                return difference
        return self.compare_gradients() if gradients and self.differentiable and not draws else None

    def in_jax(self) -> tuple[list[jax.Array], bool]:
        """The lowering's results, and whether it drew random numbers."""
        views, draws = ArrayViews(), []
        with tracing():
            arrays = [_array(self.values[arg], views) for arg in self.inputs]

            def function(key, *arrays):
                walker = Walker(KeyStream(key))
                result = walker.node(self.node, dict(self.values) | dict(zip(self.inputs, arrays, strict=True)))
                draws.append(walker.keys.used > 0)
                return _results(self.node, result)

            results = jax.jit(function)(jnp.zeros(KEY_SHAPE, jnp.uint32), *arrays)
            return jax.block_until_ready(results), draws[-1]

    def compare_gradients(self) -> Difference | None:
        """How the gradients of the node's inputs differ, for the same cotangents."""
        want, cotangents = self.gradients_in_torch()
        if not cotangents:
            return None
        got = self.gradients_in_jax(cotangents)
        for arg, ours, eager in zip(self.differentiable, got, want, strict=True):
            eager = torch.zeros_like(self.values[arg]) if eager is None else eager
            if difference := _compare(f"the gradient of its argument {arg.name}", to_tensor(ours), eager, self.bounds):
                return difference
        return None

    def gradients_in_torch(self) -> tuple[Sequence[Any], dict[int, torch.Tensor]]:
        """Gradients, and the cotangent of each result that carries one."""
        leaves = {arg: self.values[arg].detach().clone().requires_grad_() for arg in self.differentiable}
        with torch.enable_grad():
            env = dict(self.values) | {arg: leaf.clone() for arg, leaf in leaves.items()}
            result = self.in_torch(*fx.map_arg((self.node.args, self.node.kwargs), env.__getitem__))
        results = _results(self.node, result)
        generator = torch.Generator().manual_seed(_COTANGENT_SEED)
        cotangents = {
            i: torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator).to(tensor.device)
            for i, tensor in enumerate(results)
            if tensor.requires_grad
        }
        heads = [results[i] for i in cotangents]
        if not heads:
            return [], {}
        return torch.autograd.grad(heads, list(leaves.values()), list(cotangents.values()), allow_unused=True), cotangents

    def gradients_in_jax(self, cotangents: dict[int, torch.Tensor]) -> Sequence[Any]:
        """Gradients of the node's lowering."""
        views = ArrayViews()
        with tracing():
            fixed = {arg: _array(self.values[arg], views) for arg in self.inputs if arg not in self.differentiable}
            chosen = [_array(self.values[arg], views) for arg in self.differentiable]
            given = [_array(cotangent, views) for cotangent in cotangents.values()]

            def function(*arrays):
                env = dict(self.values) | fixed | dict(zip(self.differentiable, arrays, strict=True))
                result = Walker(KeyStream(jnp.zeros(KEY_SHAPE, jnp.uint32))).node(self.node, env)
                return [_results(self.node, result)[i] for i in cotangents]

            def gradients(chosen, given):
                _, vjp = jax.vjp(function, *chosen)
                return [jnp.conj(grad) for grad in vjp([jnp.conj(cotangent) for cotangent in given])]

            return jax.block_until_ready(jax.jit(gradients)(chosen, given))


def _requires_grad(node: fx.Node) -> bool:
    value = facts(node).value
    return isinstance(value, torch.Tensor) and value.requires_grad


def _tensors(value: Any) -> list[Any]:
    """The tensors, or arrays, in a value; torch's own named tuples are not all known to its pytrees."""
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (torch.Tensor, jax.Array))]


def _results(node: fx.Node, value: Any) -> list[Any]:
    """The tensors, or arrays, that a node gives; those that a writing node returns are its arguments, or copies of them."""
    return _tensors(value[1:] if isinstance(node.target, Functionalized) else value)


def _array(value: Any, views: Callable[[torch.Tensor], jax.Array]) -> Any:
    """Tensors as arrays, and a float that may change as a 0-d one."""
    if isinstance(value, (tuple, list)):
        return tuple(_array(part, views) for part in value)
    if isinstance(value, torch.Tensor):
        return views(value)
    return jnp.asarray(value, jnp.float64) if isinstance(value, float) else value
