"""Loops with one body: `scan`, `while_loop`, `fori_loop`. One XLA `while` each; the body is traced once.

They are torch's own higher-order operators, which Dynamo captures with all that their bodies read from outside (closures,
module parameters), compiled by this backend wherever they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._higher_order_ops.scan import scan as _torch_scan
from torch._higher_order_ops.while_loop import while_loop as _torch_while_loop
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as _checkpoint

from pure_backend._compat import SCAN_TAKES_INTEGERS
from pure_backend.ir.describe import describe_value
from pure_backend.transforms.capture import captured_for


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    checkpoint: bool = False,
) -> tuple[Any, Any]:
    """`carry, y = fn(carry, x)` over the leading dimension of `xs`, as `jax.lax.scan`.

    Args:
        fn: The body. It may read tensors and modules from outside, write to its own tensors, and draw random numbers, other
            ones at each step. Its carry keeps shapes and dtypes.
        init: The first carry: a pytree of tensors, numbers and None. A number gets the dtype and device that it would get in
            the loop written out.
        xs: A pytree of tensors of one leading size, or None with `length`.
        length: How many steps, if `xs` does not say.
        reverse: From the last element to the first; the ys stand in the order of `xs`.
        unroll: How many steps a turn of the loop takes.
        checkpoint: Keep only carries for the backward, and compute each step again in it.

    Returns:
        The last carry, and the ys stacked. Gradients flow to `init`, `xs` and whatever `fn` reads.

    Raises:
        ValueError: `xs` has tensors of different leading sizes, there are no steps to tell the shape of ys from, or `unroll` is
            below 1.
        TypeError: `fn` returns another carry than it is given; the message names it.
    """
    steps = _length(xs, length)
    if unroll < 1:
        raise ValueError(f"scan: unroll must be at least 1, got {unroll}")
    first = _map(lambda t: t[0], xs)
    init, unroll = _started(init, lambda carry: fn(carry, first)[0], like=(init, xs)), min(unroll, steps)
    if torch.compiler.is_compiling():
        return _scan(fn, init, xs, steps, reverse, unroll, checkpoint)
    try:
        return captured_for(fn)(_scan, fn, init, xs, steps, reverse, unroll, checkpoint)
    except TorchDynamoException:
        _check_carry("scan", init, lambda carry: fn(carry, first)[0])  # refused: nothing may have moved
        raise


def _scan(fn: Callable, init: Any, xs: Any, steps: int, reverse: bool, unroll: int, checkpoint: bool) -> tuple[Any, Any]:
    unroll = unroll if steps % unroll == 0 else 1
    index = torch.arange(steps, device=_device((init, xs)))  # so that there is something to step over without xs
    carried = [_hidden(init)] if _has_tensors(init) else [_hidden(init), index[0]]  # torch's scan wants a carry
    leaves, spec = pytree.tree_flatten(xs)
    parts = [t.reshape(steps // unroll, unroll, *t.shape[1:]) for t in (index, *leaves) if t is not None]

    def step(carry: Any, part: list[torch.Tensor]) -> tuple[Any, Any]:
        remaining = iter(part[1:])
        x = pytree.tree_unflatten([None if leaf is None else next(remaining) for leaf in leaves], spec)
        own, *rest = pytree.tree_map(lambda t: t.clone(), carry)  # so that a body may write to it
        own = _shown(own)
        new, y = _checkpoint(fn, own, x, use_reentrant=False) if checkpoint else fn(own, x)
        new, y = _hidden(_tensors(new, like=part)), _hidden(_tensors(y, like=part))
        return pytree.tree_map(lambda t: t.clone(), [new, *rest]), y

    carry_dtypes, ys_dtypes = _dtypes(carried), None
    if not SCAN_TAKES_INTEGERS:
        with torch.no_grad():  # nothing of it is computed, since nobody reads it
            ys_dtypes = _dtypes(step(carried, [t[0, 0] for t in parts])[1])

    def turn(carry: Any, part: list[torch.Tensor]) -> tuple[Any, Any]:
        carry, ys = _as_dtypes(carry, carry_dtypes), []
        for i in reversed(range(unroll)) if reverse else range(unroll):
            carry, y = step(carry, [t[i] for t in part])
            ys.append(y)
        if reverse:
            ys.reverse()
        stacked = pytree.tree_map(lambda *values: torch.stack(values), *ys)
        return _as_floats(carry), _as_floats(stacked)

    carried, ys = _torch_scan(turn, _as_floats(carried), parts, reverse=reverse)
    ys = pytree.tree_map(lambda t: t.reshape(steps, *t.shape[2:]), _as_dtypes(ys, ys_dtypes))
    return _shown(_as_dtypes(carried, carry_dtypes)[0]), _shown(ys)


# Integers pass the border of torch's scan as floats of the same bits where it takes none beside gradients.


def _dtypes(tree: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(tree)]


def _as_floats(tree: Any) -> Any:
    return pytree.tree_map(_as_float, tree)


def _as_dtypes(tree: Any, dtypes: list[torch.dtype] | None) -> Any:
    if dtypes is None:
        return tree
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_unflatten([_as_dtype(leaf, dtypes[i]) for i, leaf in enumerate(leaves)], spec)


def _as_float(leaf: torch.Tensor) -> torch.Tensor:
    if SCAN_TAKES_INTEGERS or leaf.is_floating_point() or leaf.is_complex():
        return leaf
    return leaf.view(torch.float64) if leaf.dtype is torch.int64 else leaf.to(torch.int64).view(torch.float64)


def _as_dtype(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return leaf if leaf.dtype is dtype else leaf.detach().view(torch.int64).to(dtype)


def while_loop(cond: Callable[..., Any], body: Callable[..., Any], carried: Any) -> Any:
    """`while cond(*carried): carried = body(*carried)`.

    Args:
        cond: `cond(*carried) -> bool[]`, a tensor of one element.
        body: `body(*carried) -> new values`, of the same shapes and dtypes. It may read tensors and modules from outside.
        carried: A tuple of tensors and numbers.

    Returns:
        The last values, as a tuple. There is no gradient through a loop whose number of turns is not known: use `scan` or
        `fori_loop` with Python ints.

    Raises:
        TypeError: `body` returns other shapes or dtypes than it is given; the message names the value.
        RuntimeError: A carried tensor requires a gradient.
    """
    carried = _started(tuple(carried), lambda values: _as_tuple(body(*values)), like=carried)
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in _leaves(carried)):
        raise RuntimeError(
            "while_loop has no gradient, since the number of its turns is not known: detach what is carried, or use scan or "
            "fori_loop with bounds that are Python ints"
        )
    if torch.compiler.is_compiling():
        return _while_loop(cond, body, carried)
    try:
        return captured_for(body)(_while_loop, cond, body, carried)
    except TorchDynamoException:
        _check_carry("while_loop", carried, lambda values: _as_tuple(body(*values)))
        raise


def _while_loop(cond: Callable, body: Callable, carried: tuple) -> tuple:
    def condition(*values: Any) -> Any:
        return cond(*_shown(values)).reshape(())

    def turn(*values: Any) -> tuple:
        new = body(*_shown(_clones(values)))
        return _clones(_hidden(_tensors(_as_tuple(new), like=values)))

    last: Any = _torch_while_loop(condition, turn, _hidden(carried))
    return _shown(last)


def fori_loop(lower: Any, upper: Any, body: Callable[[Any, Any], Any], init: Any) -> Any:
    """`for i in range(lower, upper): init = body(i, init)`.

    Args:
        lower: First index: an int, or an int64 tensor of one element.
        upper: One after the last.
        body: `body(i, value) -> value`; `i` is `i64[]`.
        init: The first value: a pytree of tensors and numbers.

    Returns:
        The last value. With bounds that are Python ints gradients flow, as through `scan`.
    """
    if isinstance(lower, int) and isinstance(upper, int) and upper <= lower:
        return _tensors(init)
    init = _started(init, lambda value: body(torch.zeros((), dtype=torch.int64), value), like=(init, lower, upper))
    if isinstance(lower, int) and isinstance(upper, int):
        if torch.compiler.is_compiling():
            return _counted(lower, upper, body, init)
        return captured_for(body)(_counted, lower, upper, body, init)
    leaves, spec = pytree.tree_flatten(init)
    bounds = [_tensors(bound, like=leaves).to(torch.int64).reshape(()) for bound in (lower, upper)]

    def turn(i: Any, end: Any, *values: Any) -> tuple:
        new = body(i, pytree.tree_unflatten(list(values), spec))
        return i + 1, end, *pytree.tree_leaves(new)

    _, _, *last = while_loop(lambda i, end, *values: i < end, turn, (*bounds, *leaves))
    return pytree.tree_unflatten(last, spec)


def _counted(lower: int, upper: int, body: Callable, init: Any) -> Any:
    indices = torch.arange(lower, upper, device=_device(init))
    return _scan(lambda value, i: (body(i, value), ()), init, indices, upper - lower, False, 1, False)[0]


def _as_tuple(values: Any) -> tuple:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _length(xs: Any, length: int | None) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(xs) if isinstance(leaf, torch.Tensor)]
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError("scan: xs has a tensor without dimensions; there is nothing to step over")
    sizes = [leaf.shape[0] for leaf in leaves] + ([] if length is None else [length])
    if not sizes or any(size != sizes[0] for size in sizes):
        raise ValueError(f"scan: xs and length must agree in the number of steps, got {sizes}")
    if sizes[0] < 1:
        raise ValueError("scan: there are no steps, so the shapes of ys cannot be told")
    return sizes[0]


def _map(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with its tensors mapped; torch's pytrees count None as a leaf."""
    return pytree.tree_map(lambda leaf: leaf if leaf is None else fn(leaf), tree)


def _tensors(tree: Any, like: Any = None) -> Any:
    """The tree with its numbers as tensors."""
    device = _device(tree if like is None else like)
    return _map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf, device=device), tree)


def _leaves(tree: Any) -> list[Any]:
    """The leaves that are not None."""
    return [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(tree))


def _clones(tree: Any) -> Any:
    return pytree.tree_map(lambda t: t.clone(), tree)


_NONE = "pure_backend: None"  # torch's pytrees count None as a leaf; through torch's loops it goes as a dict without leaves


def _hidden(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: {_NONE: ()} if leaf is None else leaf, tree)


def _shown(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: None if _is_none(leaf) else leaf, tree, is_leaf=_is_none)


def _is_none(node: Any) -> bool:
    return isinstance(node, dict) and _NONE in node


def _started(init: Any, step: Callable[[Any], Any], like: Any) -> Any:
    """The first carry with its numbers as tensors of the dtype and device of what a step makes of them."""
    plain = _tensors(init, like=like)
    leaves, spec = pytree.tree_flatten(init)
    if all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
        return plain
    made, new_spec = pytree.tree_flatten(_one_step(step, init, plain))
    if spec != new_spec:
        return plain  # the loop says how they differ
    return pytree.tree_unflatten([_as_made(*pair) for pair in zip(leaves, made, pytree.tree_leaves(plain), strict=True)], spec)


def _one_step(step: Callable[[Any], Any], init: Any, plain: Any) -> Any:
    """What a step makes of the first carry; nothing is computed."""
    with torch.no_grad():
        if torch.compiler.is_compiling():
            return step(plain)
        mode = FakeTensorMode()
        with mode, _OnFakes(mode):
            try:
                return step(init)
            except (TypeError, AttributeError):  # the body takes the number for a tensor
                return step(plain)


def _as_made(given: Any, made: Any, plain: Any) -> Any:
    if given is None or isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return plain
    return torch.tensor(given, dtype=made.dtype, device=made.device)


def _device(tree: Any) -> torch.device:
    return next((leaf.device for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


class _OnFakes(TorchDispatchMode):
    """Gives every operator fake tensors, also for those that a body reads from outside: a write leaves the real one alone."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.fake, (args, kwargs or {}))
        return func(*args, **kwargs)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)


def _check_carry(name: str, carry: Any, step: Callable[[Any], Any]) -> None:
    """Run one step on fake tensors, so that it writes nothing, and say how the carry that it returns differs from its own."""
    mode = FakeTensorMode()
    try:
        with torch.no_grad(), mode, _OnFakes(mode):
            returned = step(_map(mode.from_tensor, carry))
    except RuntimeError:  # a step that reads values; what Dynamo said is the better message then
        return
    before, spec = pytree.tree_flatten(carry)
    after, new_spec = pytree.tree_flatten(_tensors(returned, like=carry))
    if spec != new_spec:
        raise TypeError(f"{name}: the body was given a carry of structure {spec} and returned {new_spec}")
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if (a is None) != (b is None):
            raise TypeError(f"{name}: carry {i} was {a if a is None else describe_value(a)} and came back as {b}")
        if a is not None and (a.shape, a.dtype) != (b.shape, b.dtype):
            raise TypeError(
                f"{name}: carry {i} was {describe_value(a)} and came back as {describe_value(b)}; cast or reshape it"
            )
