"""Compile a function afresh, call it once, and report what the compiler made of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pure_backend import counters
from pure_backend.errors import DeviceError
from pure_backend.inspect.found import Break, Graph, Node, Partition
from pure_backend.inspect.report import Report
from pure_backend.inspect.wrappers import unseen
from pure_backend.ir.describe import describe_value, target_name
from pure_backend.ir.facts import facts, origin
from pure_backend.ir.impurity import Impurity, Unknown
from pure_backend.ir.source import user_frame
from pure_backend.options import Options

if TYPE_CHECKING:
    from pure_backend.calls.call_plan import CallPlan
    from pure_backend.calls.specializations import Specializations
    from pure_backend.jax_bridge.program import Program

_RECOMPILES = 1_000
"""How often Dynamo may compile one function while it is explained, beside what it was compiled to before."""


def explain(fn: Callable[..., Any], **options: Any) -> Callable[..., Report]:
    """Report what the backend makes of a function or module.

    The function is captured and compiled afresh and called once, so whatever it changes is changed; a program that an equal
    graph was compiled to before is taken from the cache, as always. Nothing that was compiled is lost.

    Args:
        fn: A function or module; one that `torch.compile` made is taken as what it was made of.
        **options: The options of the backend, see `Options`.

    Returns:
        A function of the arguments of `fn` that returns a `Report`.

    Raises:
        TypeError: There is no such option, or `fn` cannot be called.

    Example:
        >>> report = pure_backend.explain(model, remat="full")(x)
        >>> print(report)
        >>> print(report.hlo(0, stage="stablehlo", direction="backward"))
        >>> report.save_html("report.html")
    """
    if not callable(fn):
        raise TypeError(f"explain takes a function or a module, got {type(fn).__name__}: explain(fn)(*args)")
    chosen = Options.of(options)

    @functools.wraps(getattr(fn, "forward", fn), updated=())
    def run(*args: Any, **kwargs: Any) -> Report:
        captures: list[_Capture] = []
        compiled = torch.compile(_original(fn), backend=_recorder(captures, chosen))
        before, breaks_before = counters.statistics(), _break_counts()
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES):
            result = compiled(*args, **kwargs)
        statistics = _difference(before, counters.statistics())
        breaks = [*unseen(_original(fn)), *_breaks(captures, breaks_before)]
        return _report(captures, breaks, statistics, result)

    return run


def _original(fn: Callable[..., Any]) -> Callable[..., Any]:
    fn = getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


@dataclasses.dataclass(frozen=True)
class _Capture:
    """A graph as it came from Dynamo, and what it was compiled to."""

    reason: Any
    specializations: Specializations


def _recorder(captures: list[_Capture], options: Options) -> Callable[..., Any]:
    """A backend that remembers what it compiled."""
    from pure_backend.backend import compiled_graph
    from pure_backend.pipeline import normalize

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        specializations = compiled_graph(normalize(gm), options)
        captures.append(_Capture(getattr(gm, "compile_subgraph_reason", None), specializations))

        def call(*args: Any) -> Any:
            return specializations(*args)

        return call

    return backend


def _difference(before: counters.Statistics, after: counters.Statistics) -> counters.Statistics:
    counts = {f.name: getattr(after, f.name) for f in dataclasses.fields(after)}
    seconds = {stage: spent - before.seconds.get(stage, 0.0) for stage, spent in counts.pop("seconds").items()}
    return counters.Statistics(**{k: v - getattr(before, k) for k, v in counts.items()}, seconds=seconds)


# ------------------------------------------------------------------------------------------------- graph breaks


def _break_counts() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["graph_break"])


def _breaks(captures: Sequence[_Capture], before: dict[str, int]) -> list[Break]:
    """Where graphs ended, then the reasons for which Dynamo left whole functions to eager."""
    found = [_break_at(c.reason) for c in captures if c.reason is not None and c.reason.graph_break]
    known = [b.reason for b in found]
    for text, count in _break_counts().items():
        one = _break_of(text)
        left = count - before.get(text, 0) - known.count(one.reason)
        found += [one] * max(left, 0)
    return found


def _break_at(reason: Any) -> Break:
    one = _break_of(reason.reason)
    frame = reason.user_stack[-1] if reason.user_stack else None
    return one if frame is None else dataclasses.replace(one, file=frame.filename, line=frame.lineno or 0)


def _break_of(text: str) -> Break:
    first, *rest = text.strip().splitlines() or [""]
    if first.startswith("generic_jump"):
        return Break("a branch that depends on a tensor's value", "Hint: use torch.where, or torch.cond")
    shown = [line.strip() for line in rest if line.strip().startswith(("Explanation:", "Hint:"))]
    return Break(first, "\n".join(line for line in shown if "report an issue" not in line and "File an issue" not in line))


# ------------------------------------------------------------------------------------------------- programs


class Side:
    """The forward or the backward of a program, lowered when it is asked for."""

    def __init__(self, make_jaxpr: Callable[[], Any], runtime: Any) -> None:
        self._make_jaxpr = make_jaxpr
        self.runtime = runtime

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The closed jaxpr."""
        return self._make_jaxpr()

    @functools.cached_property
    def lowered(self) -> Any:
        """The program as JAX lowers it."""
        from pure_backend.jax_bridge.lower import to_hlo
        from pure_backend.jax_bridge.platform import for_platform

        platform = self.runtime.platform
        with self.runtime.placement():
            return to_hlo(for_platform(self.jaxpr, platform), platform)

    @property
    def flops(self) -> float | None:
        """XLA's count before it optimizes, or None."""
        costs = self.lowered.cost_analysis()
        return costs.get("flops", 0.0) if isinstance(costs, dict) else None

    def text(self, stage: str) -> str:
        """The program at one stage of its compilation."""
        if stage == "jaxpr":
            return str(self.jaxpr)
        return self.lowered.as_text() if stage == "stablehlo" else self.optimized()

    def optimized(self) -> str:
        """The HLO that XLA made.

        Raises:
            DeviceError: JAX has no such platform here.
        """
        from jax.extend import backend

        from pure_backend.jax_bridge.frames import in_bare_thread

        platform = self.runtime.platform
        if platform not in backend.backends():
            raise DeviceError(f"JAX cannot compile for {platform!r} here: it has {', '.join(backend.backends())}")
        with self.runtime.placement():
            return in_bare_thread(self.lowered.compile).as_text()


class Sides:
    """Both sides of a program."""

    def __init__(self, program: Any) -> None:
        self.forward = Side(lambda: program.forward_jaxpr, program.runtime)
        present = (True,) * sum(program.differentiable)
        self.backward = Side(lambda: program.backward_jaxpr(present), program.runtime) if program.inputs and present else None


def _plans(specializations: Specializations, nodes: frozenset[str]) -> Iterator[tuple[CallPlan, frozenset[str]]]:
    """All plans of a graph, each with the names of the nodes that it is for."""
    for plan in specializations.known():
        yield plan, nodes
        for stage in plan.stages():
            held = frozenset(origin(node) for node in stage.stage.gm.graph.nodes if _computes(node))
            for inner in stage.compiled.values():
                yield from _plans(inner, held)


def _computes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module")


# ------------------------------------------------------------------------------------------------- the report


def _report(captures: Sequence[_Capture], breaks: Sequence[Break], statistics: counters.Statistics, result: Any) -> Report:
    graphs, partitions, programs = [], [], []
    for number, capture in enumerate(captures):
        places: dict[str, int] = {}
        gm = capture.specializations.normalized.gm
        plans = list(_plans(capture.specializations, frozenset(node.name for node in gm.graph.nodes if _computes(node))))
        for plan, held in plans:
            for program in plan.programs():
                places |= {name: places.get(name, len(partitions)) for name in held}
                programs.append(Sides(program))
                partitions.append(_partition(number, len(held), program, len(plan.write_backs), programs[-1]))
        impurities = tuple(dict.fromkeys(impurity for plan, _ in plans for impurity in plan.impurities))
        values = _values(capture.specializations)
        nodes = _nodes(gm, values, places, {impurity.node: impurity for impurity in impurities})
        reason = next((plan.reason for plan in capture.specializations.known() if plan.reason), "")
        graphs.append(Graph(nodes, impurities, reason))
    return Report(tuple(graphs), tuple(partitions), tuple(breaks), statistics, tuple(programs), result)


def _partition(graph: int, nodes: int, program: Program, write_backs: int, sides: Sides) -> Partition:
    inner = program.jaxpr.jaxpr
    *inputs, _ = inner.invars  # the last is the random key
    fresh = [aval for r, aval in _residuals(program) if r.input is None]
    return Partition(
        graph=graph,
        nodes=nodes,
        inputs=len(inputs),
        input_bytes=sum(_bytes(v.aval) for v in inputs),
        outputs=len(inner.outvars),
        output_bytes=sum(_bytes(v.aval) for v in inner.outvars),
        write_backs=write_backs,
        residuals=len(fresh),
        residual_bytes=sum(map(_bytes, fresh)),
        flops=sides.forward.flops,
        backward_flops=None if sides.backward is None else sides.backward.flops,
        platform=program.runtime.platform,
    )


def _residuals(program: Any) -> list[tuple[Any, Any]]:
    if not (program.inputs and any(program.differentiable)):
        return []
    return list(zip(program.derivative.residuals, program.derivative.avals, strict=True))


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _nodes(
    gm: fx.GraphModule, values: dict[str, str], places: dict[str, int], impurities: dict[str, Impurity]
) -> tuple[Node, ...]:
    found = []
    for node in gm.graph.nodes:
        if node.op in ("output", "get_attr"):
            continue
        frame = user_frame(node)
        found.append(
            Node(
                name=node.name,
                operator=target_name(node.target) if _computes(node) else "",
                value=values.get(node.name, ""),
                inputs=tuple(arg.name for arg in node.all_input_nodes if arg.op != "get_attr"),
                scopes="/".join(facts(node).scopes),
                file=frame.file if frame else "",
                line=frame.line if frame else 0,
                partition=places.get(node.name),
                impurity=impurities.get(node.name),
            )
        )
    return tuple(found)


def _values(specializations: Specializations) -> dict[str, str]:
    """Dtypes and shapes by node; what comes after an impure node is known in the partition that it is in."""
    shown = {node.name: _shown(node) for node in specializations.normalized.gm.graph.nodes}
    compiled = [stage.compiled.values() for plan in specializations.known() for stage in plan.stages()]
    for inner in itertools.chain.from_iterable(compiled):
        shown |= {name: text for name, text in _values(inner).items() if text and not shown.get(name)}
    return shown


def _shown(node: fx.Node) -> str:
    value = facts(node).value
    return "" if value is None or isinstance(value, Unknown) else describe_value(value)
