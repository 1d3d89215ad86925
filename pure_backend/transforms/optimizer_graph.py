"""The step of an optimizer as a graph: torch's own code, captured by Dynamo.

What is captured is a stand-in for the optimizer, with stand-ins for parameters and gradients, so that nothing of the user's is
touched. One call on real tensors shows which input of the graph is which; it computes nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pure_backend.errors import ImpureFunctionError, UnsupportedOperatorError
from pure_backend.fx_passes.functional import Functional, Value
from pure_backend.fx_passes.normalize import Normalized
from pure_backend.ir.facts import keep_scalars
from pure_backend.ir.layout import is_distributed, part_like, whole
from pure_backend.ir.modes import no_autocast
from pure_backend.options import Options
from pure_backend.pipeline import normalize, prepare
from pure_backend.transforms.capture import Captured
from pure_backend.transforms.dynamo import SymbolicGuards, symbolic_guards
from pure_backend.transforms.hyperparameters import Place, read_settings

_FLOATS_STAY = {"specialize_float": False, "capture_scalar_outputs": True}  # torch_xla sets the first one
_SOURCE = "L['args'][0]"  # what Dynamo calls the optimizer in `Captured`


class Entry(NamedTuple):
    """A value that an optimizer keeps: `optimizer.state[parameter][name]`, counting the trained parameters."""

    parameter: int
    name: str


Slot = Entry | Place | torch.Tensor
"""Where a tensor that the graph reads is found; a constant of the graph is its own place."""


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerGraph:
    """A captured step.

    Attributes:
        functional: Its graph, as values.
        inputs: What each tensor input is, see `Wiring.update_inputs`.
        results: What each result is, see `Wiring.update_results`.
        states: Where each "state" is found.
        made: The entries of the optimizer's state that first come to be in the step.
        numbers: Where each "hyperparameter" is found.
        exact: See `Wiring.exact`.
        accepts: Whether other numbers lead to the same graph.
    """

    functional: Functional
    inputs: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]
    states: tuple[Slot, ...]
    made: tuple[Entry, ...]
    numbers: tuple[Place, ...]
    exact: frozenset[int]
    accepts: Callable[[Mapping[Place, float]], bool]


def capture_optimizer(
    optimizer: Optimizer, trained: Sequence[torch.Tensor], max_norm: float | None
) -> tuple[OptimizerGraph, dict[Entry, torch.Tensor]]:
    """Capture the step of an optimizer, after clipping if there is a largest norm.

    Args:
        optimizer: The optimizer; it is not changed.
        trained: The parameters that get a gradient; some may not be the optimizer's and count for clipping only.
        max_norm: As for `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The graph, and the state that the optimizer does not have yet, as it makes it at its first step.

    Raises:
        ImpureFunctionError: Dynamo cannot capture it.
        UnsupportedOperatorError: It changes what is no tensor in the optimizer's state, or a tensor elsewhere.
    """
    try:
        return _captured(optimizer, trained, max_norm, lists=True)
    except Unsupported:  # Adafactor asserts on numbers there
        pass
    try:
        return _captured(optimizer, trained, max_norm, lists=False)
    except Unsupported as error:
        name = type(optimizer).__name__
        raise ImpureFunctionError(f"TrainStep: the step of {name} cannot be captured as one graph: {error}") from error


def _captured(
    optimizer: Optimizer, trained: Sequence[torch.Tensor], max_norm: float | None, lists: bool
) -> tuple[OptimizerGraph, dict[Entry, torch.Tensor]]:
    """`lists`: by operators on lists of all parameters, where the optimizer has those; 52 parameters: 1.5 s, not 2.9."""
    stand_in, parameters = _stand_in(optimizer, trained, lists)
    before = _entries(stand_in, parameters)
    borrowed = [*parameters, *(p.grad for p in parameters), *(v for v in before.values() if isinstance(v, torch.Tensor))]
    norm = None if max_norm is None else torch.tensor(max_norm, dtype=torch.float64)
    seen: dict[str, Any] = {}

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        seen["guards"] = symbolic_guards(gm)

        def run(*args: Any) -> Any:
            seen["gm"], seen["args"] = normalize(gm), args
            seen["results"] = tuple(torch.empty(0) for _ in gm.graph.output_node().args[0])
            return seen["results"]

        return run

    step = inspect.unwrap(type(optimizer).step)  # without profiling hooks and the switch of the grad mode, which break graphs
    captured = Captured(backend=backend, dynamic=True)
    with torch.no_grad(), no_autocast(), torch._dynamo.config.patch(_FLOATS_STAY):
        captured(_clip_and_step, stand_in, step, parameters, norm)
    _check_state(type(optimizer).__name__, before, _entries(stand_in, parameters))
    graph, initial = _graph(seen, stand_in, parameters, before, trained, optimizer)
    kept = {id(value) for value in initial.values()}
    for tensor in (
        borrowed if not any(map(is_distributed, trained)) else ()
    ):  # Dynamo's caches hold them until they are collected, and memory that is shared is not moved
        if id(tensor) not in kept:
            tensor.data = tensor.new_empty(0)
    return graph, initial


def _check_state(name: str, before: Mapping[Entry, Any], after: Mapping[Entry, Any]) -> None:
    """Whether the step changes tensors only; a Python number would be a constant of the graph."""
    for entry, value in after.items():
        if isinstance(value, (int, float)) and before.get(entry) != value:
            raise UnsupportedOperatorError(
                f"TrainStep: {name} counts {entry.name!r} in its state as a Python number: make it a tensor"
            )


def _entries(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> dict[Entry, Any]:
    """What an optimizer keeps now."""
    return {Entry(i, n): value for i, p in enumerate(parameters) for n, value in optimizer.state.get(p, {}).items()}


def _clip_and_step(optimizer: Optimizer, step: Callable[[Optimizer], Any], parameters: list, max_norm: Any) -> None:
    if max_norm is not None:
        _clip([parameter.grad for parameter in parameters], max_norm)
    step(optimizer)


def _clip(grads: list[torch.Tensor], max_norm: torch.Tensor) -> None:
    """`torch.nn.utils.clip_grad_norm_`, whose grouping by device Dynamo does not trace on torch 2.9."""
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(coefficient)


def _stand_in(optimizer: Optimizer, trained: Sequence[torch.Tensor], lists: bool) -> tuple[Optimizer, list[torch.nn.Parameter]]:
    """An optimizer of the same class and settings whose parameters share the memory of the trained ones.

    For a DTensor it has a plain tensor of global shape that nothing writes or reads: of DTensors Dynamo would find out how the
    result of each operator lies, for 6 times as long (38 parameters: 38 s, not 6), and that is what the parameters say.
    """
    parameters = [torch.nn.Parameter(whole(p.detach())) for p in trained]
    for parameter in parameters:
        parameter.grad = parameter.detach()
    position = {id(p): i for i, p in enumerate(trained)}
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.__dict__.pop("step", None)  # a learning-rate scheduler's
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = []
    for group in optimizer.param_groups:
        own = [position[id(p)] for p in group["params"] if id(p) in position]
        own_lists = lists and not _has_tensors(group)  # which torch does not take by lists
        plain = {name: own_lists and name == "foreach" for name in ("foreach", "fused") if name in group}
        if "capturable" in group and parameters[0].device.type != "cpu":
            plain["capturable"] = True  # makes counters where the parameters lie; Dynamo takes it to be so anyway
        stand_in.param_groups.append({**group, **plain, "params": [parameters[i] for i in own]})
        for i in own:
            state = dict(optimizer.state.get(trained[i], {}))
            if _starts_at_gradient(optimizer, group) and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameters[i].detach())
            if state:
                stand_in.state[parameters[i]] = {
                    k: whole(v.detach()).to(parameters[i].device) if torch.is_tensor(v) else v for k, v in state.items()
                }
    return stand_in, parameters


def _has_tensors(group: Mapping[str, Any]) -> bool:
    """Whether a hyper-parameter is a tensor."""
    values = pytree.tree_leaves([value for name, value in group.items() if name != "params"])
    return any(isinstance(value, torch.Tensor) for value in values)


def _starts_at_gradient(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the state is the first gradient, by a graph of its own, which from zeros the graph of later steps gives too."""
    return isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0 and group["dampening"] == 0


class _Inputs:
    """Finds out what each input of a captured graph is."""

    def __init__(
        self, stand_in: Optimizer, parameters: Sequence[torch.nn.Parameter], entries: Sequence[tuple[Entry, Any]]
    ) -> None:
        self.device = parameters[0].device
        self.known: dict[int, tuple[str, Any]] = {}
        for i, parameter in enumerate(parameters):
            self.known[id(parameter)] = ("parameter", i)
            self.known[id(parameter.grad)] = ("gradient", i)
        for entry, value in entries:
            self.known[id(value)] = ("state", entry)
        for place in read_settings(stand_in).fixed:
            value = stand_in.param_groups[place.group][place.key]
            self.known.setdefault(id(value), ("state", place))
        self.sources = {place.source(_SOURCE): place for place in read_settings(stand_in).numbers}
        self.slots: dict[str, list[Any]] = {"state": [], "hyperparameter": []}

    def kind(self, placeholder: fx.Node, tensor: torch.Tensor) -> tuple[str, int]:
        """What an input is, see `Wiring.update_inputs`."""
        kind: str = "hyperparameter"
        slot: Any = self.sources.get(str(placeholder.target))
        if slot is None:
            kind, slot = self.known.get(id(tensor)) or ("state", tensor.to(self.device))
        if kind not in self.slots:
            return kind, slot
        self.slots[kind].append(slot)
        return kind, len(self.slots[kind]) - 1


def _graph(
    seen: Mapping[str, Any],
    stand_in: Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    before: Mapping[Entry, Any],
    trained: Sequence[torch.Tensor],
    optimizer: Optimizer,
) -> tuple[OptimizerGraph, dict[Entry, torch.Tensor]]:
    """What was captured, told in terms of the optimizer: which parameter, state or number each input and result is.

    Args:
        seen: The graph, its arguments, stand-ins for its results, and what Dynamo assumed of numbers.
        stand_in: What was captured; its state is now what the first step makes.
        parameters: Its parameters, in the order of `trained`.
        before: The entries of its state before the capture.
        trained: The real parameters.
        optimizer: The real optimizer.

    Returns:
        The graph, and the state that the optimizer does not have yet, as it makes it at its first step.
    """
    normalized: Normalized = seen["gm"]
    args = (*seen["args"], *normalized.read_lifted())
    placeholders = normalized.gm.graph.find_nodes(op="placeholder", sort=True)
    after = _entries(stand_in, parameters)
    inputs = _Inputs(stand_in, parameters, [*after.items(), *before.items()])
    kinds = [inputs.kind(p, a) if isinstance(a, torch.Tensor) else None for p, a in zip(placeholders, args, strict=True)]
    # An entry that is a result is new or exchanged. An exchanged one is a state although the graph may not read it.
    made = _made(after, seen["results"])
    replaced = [entry for entry in made if before.get(entry) is not None]
    read = inputs.slots["state"]
    known = {slot for slot in read if type(slot) is Entry}
    states = (*read, *(entry for entry in replaced if entry not in known))
    exact = frozenset(i for i, slot in enumerate(states) if _counts(slot, {**after, **before}, parameters))
    functional = _functional(normalized.gm, args, kinds, exact)
    graph = OptimizerGraph(
        functional=functional,
        inputs=tuple(kind for kind in kinds if kind is not None),
        results=_results(functional, kinds, states, seen["results"], made),
        states=states,
        made=tuple(entry for entry in made if entry not in replaced),
        numbers=tuple(inputs.slots["hyperparameter"]),
        exact=exact,
        accepts=_guard(seen["guards"], placeholders, inputs.sources, read_settings(stand_in).numbers),
    )
    had = _entries(optimizer, trained)
    initial = {e: part_like(value, trained[e.parameter]) for e, value in after.items() if e not in made and e not in had}
    return graph, initial


def _counts(slot: Slot, entries: Mapping[Entry, Any], parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether a state is a number kept as a tensor, which eager computes with as a Python float."""
    if not isinstance(slot, Entry):
        return False
    value = entries[slot]
    return value.ndim == 0 and value.is_floating_point() and (slot.name == "step" or parameters[slot.parameter].ndim > 0)


def _functional(gm: fx.GraphModule, args: Sequence[Any], kinds: Sequence[Any], exact: frozenset[int]) -> Functional:
    """The graph as values, for arguments that share no memory."""
    keep_scalars(gm)

    def fakes(gm: fx.GraphModule, args: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
        with FakeTensorMode() as mode:
            pairs = zip(args, kinds, strict=True)
            return mode, [a if kind is None else _empty_like(a, _dtype(a, kind, exact)) for a, kind in pairs]

    with torch.no_grad(), no_autocast():
        return prepare(gm, args, Options(repeats="off"), fakes=fakes).functional


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


def _dtype(tensor: torch.Tensor, kind: tuple[str, int], exact: frozenset[int]) -> torch.dtype:
    return torch.float64 if kind[0] == "state" and kind[1] in exact else tensor.dtype


def _made(entries: Mapping[Entry, Any], results: Sequence[Any]) -> dict[Entry, int]:
    """The entries of the state that are results of the graph, and which."""
    position = {id(result): i for i, result in enumerate(results)}
    return {entry: position[id(value)] for entry, value in entries.items() if id(value) in position}


def _results(
    functional: Functional, kinds: Sequence[Any], states: Sequence[Slot], results: Sequence[Any], made: Mapping[Entry, int]
) -> tuple[tuple[str, int], ...]:
    """What each result of the functional graph is, see `Wiring.update_results`."""
    found = {write_back.index: kinds[write_back.input] for write_back in functional.write_backs}
    if strange := [kind for kind in found.values() if kind[0] == "state" and isinstance(states[kind[1]], torch.Tensor)]:
        raise UnsupportedOperatorError(f"TrainStep: the optimizer writes {len(strange)} tensors that are not in its state")
    places = {slot: i for i, slot in enumerate(states) if type(slot) is Entry}
    new = [entry for entry in made if entry not in places]
    for entry, output in made.items():  # a new entry, or a new tensor in the place of an old one
        leaf = functional.outputs[output]
        if isinstance(leaf, Value):
            found[leaf.index] = ("state", places[entry]) if entry in places else ("made", new.index(entry))
    count = len(functional.gm.graph.output_node().args[0])
    return tuple(found.get(i, ("unused", 0)) for i in range(count))


def _guard(
    guards: SymbolicGuards,
    placeholders: Sequence[fx.Node],
    sources: Mapping[str, Place],
    numbers: Mapping[Place, float],
) -> Callable[[Mapping[Place, float]], bool]:
    """Whether numbers decide in the step what those that it was captured with decided (`if weight_decay != 0`).

    Those that are no inputs of the graph must be what they were: the step does not read them, or has them as constants.
    """
    known = {str(p.target): sources[str(p.target)] for p in placeholders if p.target in sources}
    constant = {place: number for place, number in numbers.items() if place not in known.values()}

    def accepts(numbers: Mapping[Place, float]) -> bool:
        if any(numbers.get(place) != number for place, number in constant.items()):
            return False
        return guards({name: numbers[place] for name, place in known.items()})

    return accepts
