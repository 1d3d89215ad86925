"""What every node's value looks like: run the graph on fake tensors made from the real inputs.

Dynamo leaves fake tensors in `node.meta["example_value"]`, but those carry symbolic shapes, show each tensor's *last* state
and know nothing of the modes, gradients and overlaps of this call. One run on fakes of the actual inputs gives shapes,
strides, storages, dtypes, `requires_grad` and versions exactly as eager would have them (0.15 ms a node, about 8 % of
Dynamo's own time).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from pure_backend.errors import UnsupportedOperatorError
from pure_backend.fx_passes import higher_order
from pure_backend.fx_passes.functorch import propagate_region
from pure_backend.ir.describe import describe_node
from pure_backend.ir.facts import Facts, facts, reads_input_scalar
from pure_backend.ir.geometry import Geometry
from pure_backend.ir.region import Region

_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
_AUTOCAST_DEVICES = ("cpu", "cuda", "xla")
_SAMPLE_SCALAR = 0.5


def propagate(gm: fx.GraphModule, args: Sequence[Any], mode: FakeTensorMode) -> None:
    """Run a normalized graph on fake arguments and leave `Facts` in every node's meta.

    Args:
        gm: A graph that may be annotated.
        args: One value a placeholder: fake tensors of `mode`, ints, floats, None.
        mode: The fake mode the tensors belong to.

    Raises:
        UnsupportedOperatorError: A node needs the values of its inputs (a host read).
        Exception: Whatever eager would raise for the node on these shapes.
    """
    with _modes_kept(), mode:
        _run_nodes(gm, args)


def run_body(gm: fx.GraphModule, args: Sequence[Any]) -> tuple[fx.GraphModule, Any]:
    """Propagate a private copy of a higher-order operator's body, inside a propagation that is under way."""
    copy = fx.GraphModule(gm, fx.Graph())
    copy.graph.output(copy.graph.graph_copy(gm.graph, {}))
    _run_nodes(copy, args)
    return copy, facts(copy.graph.output_node()).value


def _run_nodes(gm: fx.GraphModule, args: Sequence[Any]) -> None:
    remaining = iter(args)
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        argument = next(remaining) if node.op == "placeholder" else None
        values[node] = _run(node, gm, values, argument)


def _run(node: fx.Node, gm: fx.GraphModule, values: dict[fx.Node, Any], argument: Any) -> Any:
    node.meta.pop("geometry", None)
    tensor_args = [arg for arg in node.all_input_nodes if isinstance(values[arg], torch.Tensor)]
    versions = [values[arg]._version for arg in tensor_args]
    histories = {arg: _history(values[arg]) for arg in tensor_args}
    autocast = _autocast_now()
    value = _evaluate(node, gm, values, argument)
    written = [arg for arg, seen in zip(tensor_args, versions, strict=True) if values[arg]._version != seen]
    written += [arg for arg in _undeclared_writes(node) if arg not in written]
    restrided = _restrided([arg for arg in written if arg in values])
    written = [arg for arg in written if arg not in dict(restrided)]
    for arg, geometry in restrided:
        arg.meta["geometry"] = geometry
    node.meta["facts"] = Facts.of(
        value,
        writes=tuple(written),
        recorded=tuple(arg for arg in written if _history(values[arg]) is not histories.get(arg)),
        grad=torch.is_grad_enabled(),
        autocast=autocast,
        restrided=restrided,
        bodies=node.meta.pop("bodies", ()),
    )
    return value


def _evaluate(node: fx.Node, gm: fx.GraphModule, values: dict[fx.Node, Any], argument: Any) -> Any:
    if node.op == "placeholder":
        return argument
    if node.op == "get_attr":
        return attrgetter(node.target)(gm)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        if node.op == "output":
            return args[0]
        if reads_input_scalar(node):
            return _SAMPLE_SCALAR
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            value, node.meta["bodies"] = higher_order.propagate(node, args, kwargs, run_body)
            return value
        if isinstance(node.target, Region):
            value, node.meta["bodies"] = propagate_region(node.target, args, run_body)
            return value
        if node.target is _ENTER_INFERENCE:
            return _set_grad_enabled(not args[0])
        if node.target is _EXIT_INFERENCE:
            return torch._C._set_grad_enabled(args[0])
        if node.target in (operator.getitem, operator.setitem) and _has_index_tensor(args[1]):
            return _indexed_by_tensor(node, *args)
        return node.target(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedOperatorError(
            f"{describe_node(node)}\nneeds the values of its inputs, which a compiled program does not have ({error})"
        ) from error


def _history(tensor: torch.Tensor) -> Any:
    """The autograd node that changes when a write to a tensor is recorded: that of its base if it is a view."""
    return (tensor if tensor._base is None else tensor._base).grad_fn


def _restrided(args: Sequence[fx.Node]) -> tuple[tuple[fx.Node, Geometry], ...]:
    """The arguments whose place in memory is not what it was: `t_` and its like count as writes for autograd only."""
    pairs = ((arg, Geometry.of(facts(arg).value)) for arg in args)
    return tuple((arg, now) for arg, now in pairs if now.place != arg.meta.get("geometry", facts(arg).geometry).place)


def _has_index_tensor(index: Any) -> bool:
    return any(map(_is_index_tensor, index if isinstance(index, tuple) else (index,)))


def _is_index_tensor(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.ndim == 0 and part.dtype not in (torch.bool, torch.uint8)


def _indexed_by_tensor(node: fx.Node, x: torch.Tensor, index: Any, *value: Any) -> Any:
    """`x[..., i]` with a 0-d integer tensor, whose value eager reads to make a view; in a program it is a gather."""
    parts = index if isinstance(index, tuple) else (index,)
    stand_in = tuple(0 if _is_index_tensor(part) else part for part in parts)
    result = node.target(x, stand_in, *value)
    return result.clone() if isinstance(result, torch.Tensor) else result


def _set_grad_enabled(enabled: bool) -> bool:
    """Set the mode and return the one before it, which the matching exit node restores."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(enabled and before)
    return before


def _undeclared_writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Running statistics, which normalization layers write without saying so in their schema (pytorch issue 88375)."""
    if node.target in (F.batch_norm, torch.batch_norm):
        position, flag = {F.batch_norm: (1, 5), torch.batch_norm: (3, 5)}[node.target]
        training = _argument(node, flag, "training", False)
    elif node.target in (F.instance_norm, torch.instance_norm):
        position, flag = {F.instance_norm: (1, 5), torch.instance_norm: (3, 5)}[node.target]
        training = _argument(node, flag, "use_input_stats", True)
    else:
        return ()
    stats = (
        _argument(node, position, "running_mean", None),
        _argument(node, position + 1, "running_var", None),
    )
    return tuple(arg for arg in stats if training and isinstance(arg, fx.Node) and facts(arg).value is not None)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def _modes_kept() -> Iterator[None]:
    """Put the caller's grad and autocast modes back, also when a node raises inside a region it had opened."""
    grad = torch.is_grad_enabled()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES]
    nesting = torch.autocast_increment_nesting()
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            yield
    finally:
        torch._C._set_grad_enabled(grad)
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        while torch.autocast_decrement_nesting() >= nesting:
            pass
