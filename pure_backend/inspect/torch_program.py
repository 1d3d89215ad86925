"""The JAX program of a torch function, captured by Dynamo and not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pure_backend.backend import compiled_graph
from pure_backend.calls.plan import Bordered, Plan
from pure_backend.ir.donors import donors
from pure_backend.options import Options
from pure_backend.pipeline import normalize


@dataclasses.dataclass(frozen=True)
class Owner:
    """What an input of a program is to the user.

    Attributes:
        kind: `"parameter"` (also a buffer), `"state"` of an optimizer, `"batch"` or `"other"`.
        name: The parameter's name, for a state that of its parameter.
        shape: The parameter's shape.
        title: What it is called, if that is not the name.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    title: str = ""

    @property
    def label(self) -> str:
        """What it is called."""
        return self.title or self.name


@dataclasses.dataclass(frozen=True)
class NamedProgram:
    """A program with names.

    Attributes:
        jaxpr: The closed jaxpr.
        inputs: The names of its inputs.
        outputs: The names of its outputs.
        donated: Positions of the inputs whose memory may be reused.
        written: For each written input, by position, the output that is its new value.
        owners: What each input is to the user, where that is known.
    """

    jaxpr: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    donated: tuple[int, ...]
    written: dict[int, int]
    owners: tuple[Owner, ...] = ()


def output_names(count: int, written: dict[int, int], inputs: Sequence[str]) -> tuple[str, ...]:
    """Names of a program's outputs: `new x` for the new value of x, the others numbered."""
    into = {output: given for given, output in written.items()}
    others = [i for i in range(count) if i not in into]
    return tuple(f"new {inputs[into[i]]}" if i in into else f"output {others.index(i)}" for i in range(count))


class _Stop(Exception):
    """Raised in place of the first call of the captured graph."""

    def __init__(self, specializations: Any, args: tuple) -> None:
        self.specializations = specializations
        self.args_of_graph = args


def capture(fn: Any, args: tuple, kwargs: dict[str, Any], donate: tuple[int, ...], backward: bool) -> NamedProgram:
    """The forward or the backward of a torch function.

    Args:
        fn: A function or a module; one graph.
        args: Its arguments.
        kwargs: Its keyword arguments.
        donate: Positions of arguments that are donated.
        backward: Which of the two.

    Raises:
        ValueError: There is no graph, or nothing to differentiate, or `donate` names no tensor that the graph reads.
    """
    stop = _captured(fn, args, kwargs)
    plan = stop.specializations.new_plan(stop.args_of_graph)
    gm, given = stop.specializations.normalized.gm, stop.args_of_graph
    if isinstance(plan, Bordered):
        gm, given, plan = plan.border.gm, plan.border.enter(given), plan.plan
    if not isinstance(plan, Plan):
        raise ValueError(f"compile_for_tpu: the graph runs in eager: {plan.reason}")
    program = plan.program
    placeholders = gm.graph.find_nodes(op="placeholder", sort=True)
    names = (*(placeholders[i].name.strip("_") for i in plan.inputs.firsts), "key")
    if backward:
        return _backward(program, names)
    place = plan.inputs.position
    written = {place[write_back.input]: write_back.index for write_back in plan.write_backs}
    given_away = {place[placeholders.index(n)] for n in donors(gm)}
    given_away |= {place[_position(args, i, stop.args_of_graph)] for i in donate}
    owners = (*(owner_of(given[i], fn, name) for i, name in zip(plan.inputs.firsts, names, strict=False)), _KEY)
    outputs = output_names(program.outputs, written, names)
    residuals = [f"residual {i}" for i in range(len(program.forward_jaxpr.jaxpr.outvars) - program.outputs)]
    return NamedProgram(program.forward_jaxpr, names, (*outputs, *residuals), tuple(sorted(given_away)), written, owners)


_KEY = Owner("other", "key", ())


def owner_of(tensor: torch.Tensor, model: Any, otherwise: str) -> Owner:
    """The parameter or buffer of a model that a tensor is; else it counts as a part of the batch."""
    known = (*model.named_buffers(), *model.named_parameters()) if isinstance(model, torch.nn.Module) else ()
    name = next((name for name, own in known if own is tensor), None)
    return Owner("batch", otherwise, tuple(tensor.shape)) if name is None else Owner("parameter", name, tuple(tensor.shape))


def _captured(fn: Any, args: tuple, kwargs: dict[str, Any]) -> _Stop:
    options = Options(on_impure="error")

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        normalized = normalize(gm)
        specializations = compiled_graph(normalized, options)

        def stop(*inputs: Any) -> Any:
            raise _Stop(specializations, (*inputs, *normalized.read_lifted()))

        return stop

    try:
        torch.compile(fn, backend=backend, fullgraph=True)(*args, **kwargs)
    except _Stop as stop:
        return stop
    raise ValueError("compile_for_tpu: the function has no tensor operation")


def _backward(program: Any, names: tuple[str, ...]) -> NamedProgram:
    if not program.inputs:
        raise ValueError("compile_for_tpu: nothing requires a gradient: set requires_grad on an argument or a parameter")
    outputs = [i for i, carries in enumerate(program.differentiable) if carries]
    jaxpr = program.backward_jaxpr((True,) * len(outputs))
    residuals = [f"residual {r.fresh}" if r.input is None else names[r.input] for r in program.derivative.residuals]
    inputs = (*residuals, *(f"cotangent {i}" for i in outputs))
    return NamedProgram(jaxpr, inputs, tuple(f"gradient of {names[i]}" for i in program.inputs), (), {})


def _position(args: tuple, number: int, graph_args: tuple) -> int:
    given = args[number] if number < len(args) else None
    for position, value in enumerate(graph_args):
        if isinstance(given, torch.Tensor) and value is given:
            return position
    raise ValueError(f"compile_for_tpu: donate has {number}, which is no tensor that the function reads")
