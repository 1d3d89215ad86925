"""The backend's own time per warm call on plain CPU tensors, with 900 long-lived parameters and with 5 tensors.

    JAX_PLATFORMS=cpu python benchmarks/overhead.py

Computed is `tanh(x @ stack(parameters).T)`: little work, many tensors. The peers:

- bare JAX: the same computation in one jitted program, on arrays that are held (with gradient: outputs and gradients in one);
- assume_pure: through `torch.compile`; direct: the backend's function alone, without Dynamo's guards;
- torch autograd (with gradient): an `autograd.Function` of as many inputs that returns ready-made gradients: what torch
  itself needs before any backend has done anything;
- assume_pure alone: before the other peers of its table have run and fragmented the heap;
- naive dlpack: the bare program, with every tensor converted on the way in and every result on the way out. It is measured
  last of all: the thousands of small objects it frees fragment the heap, after which every other peer takes twice as long.

The breakdown shows the time inside each part without the parts it calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from _measure import (
    arguments,
    difference,
    measure,
    measure_alone,
    median,
    print_machine,
    print_table,
    remark,
    report,
    verdict,
    warm,
)
from torch import nn

from pure_backend.backend import assume_pure
from pure_backend.calls.guard import Guard
from pure_backend.calls.plan import Plan
from pure_backend.calls.specializations import Specializations
from pure_backend.jax_bridge.autograd import PureFunction
from pure_backend.jax_bridge.program import Call
from pure_backend.jax_bridge.runtimes.jax import JaxRuntime

Peers = dict[str, Callable[[], object]]

PARTS = (
    (Specializations, "__call__", "the backend's call, the rest"),
    (Guard, "__call__", "guard"),
    (Plan, "gather", "gather inputs"),
    (PureFunction, "forward", "autograd.Function, forward"),
    (PureFunction, "backward", "autograd.Function, backward"),
    (JaxRuntime, "enter", "tensors -> arrays"),
    (Call, "__call__", "executable, and wait for it"),
    (JaxRuntime, "leave", "arrays -> tensors"),
)


class Stacked(nn.Module):
    """`tanh(x @ stack(parameters).T)` of many small parameters."""

    def __init__(self, parameters: int, width: int = 16) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(width) for _ in range(parameters)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`f32[batch, width]` -> `f32[batch, parameters]`."""
        return torch.tanh(x @ torch.stack(list(self.rows)).t())


@jax.jit
def in_jax(rows, x):
    """`Stacked` in JAX."""
    return jnp.tanh(x @ jnp.stack(rows).T)


@jax.jit
def in_jax_with_gradient(rows, x, cotangent):
    """`Stacked` in JAX with the gradients of its parameters."""
    out, vjp = jax.vjp(lambda rows: in_jax(rows, x), rows)
    return out, vjp(cotangent)[0]


def peers_of(model: Stacked, x: torch.Tensor, grad: bool) -> Peers:
    """The peers; each computes the output and, with `grad`, the gradients of all parameters."""
    parameters = list(model.parameters())
    cotangent = torch.ones(len(x), len(parameters))
    arrays, x_array, cotangent_array = [_array(p) for p in parameters], _array(x), _array(cotangent)

    def bare():
        if not grad:
            return in_jax(arrays, x_array).block_until_ready()
        out, grads = in_jax_with_gradient(arrays, x_array, cotangent_array)
        out.block_until_ready()  # all results of one program are ready together
        return out, grads

    def of(call: Callable[[], Any]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(call(), parameters, cotangent)) if grad else call

    compiled, direct = torch.compile(model, backend="assume_pure"), backend_function(model, x)
    peers = {
        "bare JAX": bare,
        "assume_pure": of(lambda: compiled(x)),
        "direct": of(lambda: _first(direct())),
    }
    return peers | ({"torch autograd": of(autograd_alone(parameters, cotangent))} if grad else {})


def naive_peer(model: Stacked, x: torch.Tensor, grad: bool) -> Callable[[], object]:
    """The bare program with a conversion of every tensor in every call."""
    parameters = list(model.parameters())
    cotangent = torch.ones(len(x), len(parameters))

    def naive():
        inputs = [[jax.dlpack.from_dlpack(p.detach()) for p in parameters], jax.dlpack.from_dlpack(x)]
        if grad:
            inputs.append(jax.dlpack.from_dlpack(cotangent))
        results = (in_jax_with_gradient if grad else in_jax)(*inputs)
        return [torch.from_dlpack(leaf) for leaf in jax.tree.leaves(jax.block_until_ready(results))]

    return naive


def backend_function(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """What the backend returned to Dynamo, with the inputs that Dynamo gives it."""
    seen: dict[str, Any] = {}

    def backend(gm, example_inputs):
        call = assume_pure(gm, example_inputs)

        def watch(*args):
            seen["call"] = functools.partial(call, *args)
            return call(*args)

        return watch

    torch.compile(model, backend=backend)(x)
    return seen["call"]


def autograd_alone(parameters: list[nn.Parameter], out: torch.Tensor) -> Callable[[], Any]:
    """A call of an `autograd.Function` that computes nothing."""
    grads = [torch.zeros_like(p) for p in parameters]

    class Ready(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return out.detach()

        @staticmethod
        def backward(ctx, cotangent):
            return tuple(grads)

    return lambda: Ready.apply(*parameters)


def _first(outputs: Any) -> torch.Tensor:
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def _array(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy().copy())


# ------------------------------------------------------------------------------------------------------------ breakdown


@dataclasses.dataclass
class Ledger:
    """Seconds and calls by part, each part without the parts inside it."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    open: list[float] = dataclasses.field(default_factory=list)

    def timed(self, function: Callable, part: str) -> Callable:
        """A function that books its time under a part."""

        @functools.wraps(function)
        def call(*args):
            self.open.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                whole = time.perf_counter() - started
                inside = self.open.pop()
                if self.open:
                    self.open[-1] += whole
                self.seconds[part] = self.seconds.get(part, 0.0) + whole - inside
                self.calls[part] = self.calls.get(part, 0) + 1

        return call


@contextlib.contextmanager
def clocks() -> Iterator[Ledger]:
    """Clocks on all parts."""
    ledger = Ledger()
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in PARTS]
    for (owner, name, part), (_, _, original) in zip(PARTS, originals, strict=True):
        static = isinstance(original, staticmethod)
        timed = ledger.timed(original.__func__ if static else original, part)
        setattr(owner, name, staticmethod(timed) if static else timed)
    try:
        yield ledger
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def breakdown(call: Callable[[], object], rounds: int) -> list[tuple[str, float, float]]:
    """Parts of a call: name, calls per call, median seconds per call."""
    history: dict[str, list[float]] = {part: [] for _, _, part in PARTS}
    outside = []
    counts: dict[str, int] = {}
    with clocks() as ledger:
        call()
        for _ in range(rounds):
            ledger.seconds.clear()
            ledger.calls.clear()
            started = time.perf_counter()
            call()
            outside.append(time.perf_counter() - started - sum(ledger.seconds.values()))
            counts = dict(ledger.calls)
            for part, seconds in history.items():
                seconds.append(ledger.seconds.get(part, 0.0))
    parts = [("Dynamo, torch.autograd, the clocks", 1.0, statistics.median(outside))]
    return parts + [(part, counts[part], statistics.median(s)) for part, s in history.items() if part in counts]


# ---------------------------------------------------------------------------------------------------------------- main


@dataclasses.dataclass(frozen=True)
class Case:
    """How many parameters, with or without gradient, and how much overhead is allowed."""

    parameters: int
    grad: bool
    rounds: int
    unit: str
    target: float

    @property
    def name(self) -> str:
        """For tables; with the input, 4 parameters are 5 tensors."""
        tensors = f"{self.parameters + 1 if self.parameters < 10 else self.parameters} tensors"
        return f"{tensors}, {'forward + backward' if self.grad else 'no grad'}"

    @property
    def scale(self) -> float:
        """Units in a second."""
        return {"ms": 1e3, "us": 1e6}[self.unit]

    def inputs(self) -> tuple[Stacked, torch.Tensor]:
        """Model and batch."""
        torch.manual_seed(0)
        return Stacked(self.parameters), torch.randn(4, 16)


def compare(case: Case) -> float:
    """Measure one case but for its naive peer, and print it.

    Returns:
        Median seconds of a compiled call.
    """
    torch._dynamo.reset()
    unit, scale = case.unit, case.scale
    with torch.set_grad_enabled(case.grad):
        peers = peers_of(*case.inputs(), case.grad)
        samples = measure_alone("assume_pure", peers["assume_pure"], case.rounds)
        warm(peers)
        samples |= measure(peers, case.rounds)
        report(case.name, samples, "bare JAX", unit)
        parts = breakdown(peers["assume_pure"], case.rounds)
    rows = [(part, f"{calls:g}", f"{scale * seconds:.2f}") for part, calls, seconds in parts]
    print_table(f"{case.name}: where the time goes", ("part", "calls", f"median {unit}"), rows)
    over = scale * difference(samples, "assume_pure", "bare JAX")
    verdict(f"overhead over bare JAX ({case.name})", over, case.target, unit)
    if case.grad:
        alone = scale * median(samples["torch autograd"])
        remark(f"of which torch's autograd needs {alone:.3g} {unit} by itself")
    return median(samples["assume_pure"])


def compare_naive(cases: dict[Case, float]) -> None:
    """Measure the naive peers and print them beside the compiled calls measured before."""
    rows = []
    for case, ours in cases.items():
        peers = {"naive": naive_peer(*case.inputs(), case.grad)}
        warm(peers)
        naive = median(measure(peers, case.rounds)["naive"])
        rows.append((case.name, *(f"{case.scale * s:.2f} {case.unit}" for s in (naive, ours)), f"{naive / ours:.3g}"))
    print_table("naive dlpack", ("case", "naive", "assume_pure", "ratio"), rows)


def main() -> None:
    """Run all and print."""
    args = arguments(__doc__, rounds=100).parse_args()
    many, rounds = (90, 30) if args.quick else (900, args.rounds)
    cases = (
        Case(many, True, max(rounds // 3, 10), "ms", 3.0),  # first, on a fresh heap
        Case(many, False, rounds, "ms", 3.0),
        Case(4, True, rounds, "us", 100.0),
        Case(4, False, rounds, "us", 100.0),
    )
    print_machine()
    compare_naive({case: compare(case) for case in cases})


if __name__ == "__main__":
    main()
