"""What every node's value looks like: run the graph on fake tensors made from the real inputs.

Dynamo leaves fake tensors in `example_value`, but those carry symbolic shapes, show each tensor's *last* state
and know nothing of the modes, gradients and overlaps of this call. One run on fakes of the actual inputs gives shapes,
strides, storages, dtypes, `requires_grad` and versions exactly as eager would have them (0.15 ms a node, about 8 % of
Dynamo's own time).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from pure_backend.errors import UnsupportedOperatorError
from pure_backend.fx_passes import higher_order
from pure_backend.fx_passes.checks import Checked, Suspected
from pure_backend.fx_passes.effects import Lowerable, impurity, runs_on_fakes
from pure_backend.fx_passes.functorch import propagate_region
from pure_backend.fx_passes.scopes import name_scopes
from pure_backend.fx_passes.stretch import has_body, is_autograd_function
from pure_backend.ir.describe import tensor_leaves, unsuitable_tensor
from pure_backend.ir.facts import facts, learn, origin, reads_input_scalar
from pure_backend.ir.failures import fault_text
from pure_backend.ir.geometry import Geometry
from pure_backend.ir.impurity import Impurity, Unknown, unknowns
from pure_backend.ir.modes import AUTOCAST_DEVICES, modes_kept
from pure_backend.ir.region import Region
from pure_backend.ir.wrapper import dispatches

_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
_SAMPLE_SCALAR = 0.5


def propagate(gm: fx.GraphModule, args: Sequence[Any], mode: FakeTensorMode, lowerable: Lowerable) -> list[Impurity]:
    """Run a normalized graph on fake arguments and leave `Facts` on every node.

    Args:
        gm: A graph that may be annotated.
        args: One value per placeholder: fake tensors of `mode`, ints, floats, None, or `Unknown`.
        mode: The fake mode the tensors belong to.
        lowerable: Whether an operator that is not torch's own has a JAX implementation.

    Returns:
        The impure nodes. If there are any, the values of some nodes are `Unknown`. A node that raises is one: eager decides.
    """
    run = _Run(gm, lowerable)
    grad = torch.is_grad_enabled()
    # outside of inference mode, where what is made has versions and gradients
    with modes_kept(), torch.inference_mode(False), torch.set_grad_enabled(grad), mode, Checked():
        run.all(args)
    return run.impurities


class _Outcome(NamedTuple):
    """What running a node on fakes gave: its value, its propagated bodies, and why it is impure if it is."""

    value: Any
    bodies: tuple[fx.GraphModule, ...] = ()
    impurity: Impurity | None = None


class _Run:
    """One run of a graph on fakes.

    Attributes:
        values: The value of each node so far.
        moved: Where a tensor lies that was given another geometry in place.
        impurities: Of the nodes so far.
    """

    def __init__(self, gm: fx.GraphModule, lowerable: Lowerable) -> None:
        self.gm = gm
        self.lowerable = lowerable
        self.values: dict[fx.Node, Any] = {}
        self.moved: dict[fx.Node, Geometry] = {}
        self.impurities: list[Impurity] = []

    def all(self, args: Sequence[Any]) -> None:
        remaining = iter(args)
        for node in self.gm.graph.nodes:
            argument = next(remaining) if node.op == "placeholder" else None
            self.values[node] = self.one(node, argument)

    def one(self, node: fx.Node, argument: Any) -> Any:
        """The value of one node; its facts are noted."""
        values = self.values
        tensor_args = [arg for arg in node.all_input_nodes if isinstance(values[arg], torch.Tensor)]
        versions = [values[arg]._version for arg in tensor_args]
        histories = {arg: _history(values[arg]) for arg in tensor_args}
        followed = [arg for arg in tensor_args if values[arg].requires_grad]
        autocast = _autocast_now()
        value, bodies, impurity = self.evaluate(node, argument)
        self.impurities += [impurity] if impurity is not None else []
        changed = [arg for arg, seen in zip(tensor_args, versions, strict=True) if values[arg]._version != seen]
        written = self.written_itself(node, changed)
        written += [arg for arg in (*_undeclared_writes(node), *_writes_of_bodies(node, bodies)) if arg not in written]
        restrided = self.restrided([arg for arg in written if arg in values])
        written = [arg for arg in written if arg not in dict(restrided)]
        self.moved.update(restrided)
        learn(
            node,
            value=value,
            origin=origin(node),
            writes=tuple(written),
            recorded=tuple(arg for arg in written if _history(values[arg]) is not histories.get(arg)),
            grad=torch.is_grad_enabled(),
            autocast=autocast,
            restrided=restrided,
            cut=tuple(arg for arg in followed if not values[arg].requires_grad),
            bodies=bodies,
        )
        return value

    def written_itself(self, node: fx.Node, changed: list[fx.Node]) -> list[fx.Node]:
        """Of the arguments whose version changed those that are written: tensors on one memory share a version.

        Where there are several on one, the node is run on tensors that share nothing.
        """
        storages = {self.values[arg].untyped_storage()._cdata for arg in changed}
        if len(storages) == len(changed) or has_body(node):
            return changed
        apart = {arg: _apart(self.values[arg]) for arg in node.all_input_nodes}
        versions = {arg: apart[arg]._version for arg in changed}
        with torch.no_grad():
            self.plain(node, *fx.map_arg((node.args, node.kwargs), apart.__getitem__))
        return [arg for arg in changed if apart[arg]._version != versions[arg]]

    def restrided(self, args: Sequence[fx.Node]) -> tuple[tuple[fx.Node, Geometry], ...]:
        """The arguments whose place in memory is not what it was: `t_` and its like count as writes for autograd only."""
        pairs = ((arg, Geometry.of(facts(arg).value)) for arg in args)
        return tuple((arg, now) for arg, now in pairs if now.place != self.moved.get(arg, facts(arg).geometry).place)

    def evaluate(self, node: fx.Node, argument: Any) -> _Outcome:
        """What a node gives; its value is `Unknown` where it cannot be known."""
        if node.op == "placeholder":
            return _Outcome(argument)
        if node.op == "get_attr":
            return _Outcome(attrgetter(node.target)(self.gm))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.op == "output":
            return _Outcome(args[0])
        missing = unknowns(args) + unknowns(kwargs)
        unsuitable = next((value.unsuitable for value in missing if value.unsuitable), "")
        found = Impurity.of(node, "layout", unsuitable) if unsuitable else impurity(node, self.lowerable)
        if missing or (found is not None and not runs_on_fakes(found)):
            return _Outcome(Unknown(), impurity=found)
        try:
            value, bodies = self.call(node, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            found = found or Impurity.of(node, "host read", f"its result depends on the values of its inputs ({error})")
        except UnsupportedOperatorError as error:
            found = found or Impurity.of(node, "no lowering", str(error))
        except Exception as error:
            found = found or _raised_on_fakes(node, error)
        else:
            reason = next((reason for leaf in tensor_leaves(value) if (reason := unsuitable_tensor(leaf))), "")
            if not reason:
                return _Outcome(value, bodies, found)
            return _Outcome(
                Unknown(f"it reads {reason}"), bodies, found or Impurity.of(node, "layout", f"its result is {reason}")
            )
        return _Outcome(Unknown(), impurity=found)

    def call(self, node: fx.Node, args: tuple, kwargs: dict) -> higher_order.Result:
        """Run one node on fakes: its value and its propagated bodies."""
        if not has_body(node):
            return self.plain(node, args, kwargs), ()
        if any(map(dispatches, tensor_leaves((args, kwargs)))):
            if not is_autograd_function(node):
                raise UnsupportedOperatorError("its body is given a tensor subclass")
            return node.target(*args, **kwargs), ()  # torch's own, to be taken apart
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return higher_order.propagate(node, args, kwargs, self.body)
        higher_order.refuse_runtime_scalars(node)
        return propagate_region(node.target, args, kwargs, self.body)

    def plain(self, node: fx.Node, args: tuple, kwargs: dict) -> Any:
        """The value of a node without bodies."""
        if reads_input_scalar(node):
            return _SAMPLE_SCALAR
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        if node.target is _ENTER_INFERENCE:
            return _set_grad_enabled(not args[0])
        if node.target is _EXIT_INFERENCE:
            return torch._C._set_grad_enabled(args[0])
        if node.target in (operator.getitem, operator.setitem) and _has_index_tensor(args[1]):
            return _indexed_by_tensor(node, *args)
        return node.target(*args, **kwargs)

    def body(self, gm: fx.GraphModule, args: Sequence[Any]) -> tuple[fx.GraphModule, Any]:
        """Propagate a private copy of a higher-order operator's body.

        Raises:
            UnsupportedOperatorError: The body has an impure node, which makes the whole operator impure.
        """
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        copy = fx.GraphModule(gm, graph)  # takes over the attributes that the graph names: bodies within the body
        name_scopes(copy)
        run = _Run(copy, self.lowerable)
        run.all(args)
        if run.impurities:
            raise UnsupportedOperatorError(f"its body has an impure node: {run.impurities[0]}")
        return copy, facts(copy.graph.output_node()).value


def _raised_on_fakes(node: fx.Node, error: Exception) -> Impurity:
    """Why a node is impure that raised: it reads values, or eager may raise as well."""
    if "its data is not allocated yet" in str(error):  # how torch says that C++ read a fake tensor (tensor_split)
        return Impurity.of(node, "host read", "its result depends on the values of its inputs")
    if isinstance(error, Suspected):
        return Impurity.of(node, "suspected", str(error))
    text = fault_text(error) if isinstance(node.target, (torch._ops.HigherOrderOperator, Region)) else f"{error!r}"
    return Impurity.of(node, "raises", text)


def _apart(value: Any) -> Any:
    """A tensor with memory of its own."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _history(tensor: torch.Tensor) -> Any:
    """The autograd node that changes when a write to a tensor is recorded: that of its base if it is a view."""
    return (tensor if tensor._base is None else tensor._base).grad_fn


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


def _writes_of_bodies(node: fx.Node, bodies: Sequence[fx.GraphModule]) -> tuple[fx.Node, ...]:
    """The operands of a higher-order operator that its bodies write, declared or not."""
    nodes = [inner for body in bodies for inner in body.graph.nodes]
    storages = {facts(arg).geometry.storage for inner in nodes for arg in facts(inner).writes}
    return tuple(arg for arg in node.all_input_nodes if (lies := facts(arg).geometry) and lies.storage in storages)


def _undeclared_writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Writes that change no version: running statistics, which normalization layers write without saying so in their schema
    (pytorch issue 88375), and those of operators on lists, which fake tensors do not count.
    """
    name = getattr(node.target, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        return tuple(_argument(node, 0, "self", ()))
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
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DEVICES if torch.is_autocast_enabled(kind))
