"""Torch's own database of modules (`torch.testing._internal.common_modules.module_db`), compiled against eager.

The suite runs the first inputs of each module, in training, and in evaluation where that is another computation.
`python tests/test_module_db.py [NAME ...]` runs all and prints a row for each module: what differs, raises or is left to eager.
"""

import copy
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import compiled, named_leaves, same
from torch import nn
from torch.utils import _pytree as pytree

import pure_backend
from pure_backend import ImpureGraphError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db

MODULES = {info.name.removeprefix("nn."): info for info in module_db}
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one input of a module went: `passes` in programs, `eager`, `no graph`, or `refused` by torch; and why."""

    how: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A module in its mode, and what it is called with."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]


def samples(name: str, train: bool) -> Iterator[Sample]:
    """Torch's inputs of a module, the same ones each time."""
    info = MODULES[name]
    torch.manual_seed(0)
    for made in info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=train):
        arguments = made.constructor_input
        module = info.module_cls(*arguments.args, **arguments.kwargs).train(train)
        if made.forward_input is not None:
            yield Sample(module, made.forward_input.args, made.forward_input.kwargs)


def judge(sample: Sample, device: str | torch.device = "cpu") -> Outcome:
    """Run a sample eagerly on the CPU and compiled on a device.

    Raises:
        AssertionError: The two differ.
    """
    try:
        want = results(sample, "cpu", lambda module: module)
    except Exception as error:
        return Outcome("refused", first_line(error))
    torch._dynamo.reset()
    calls, reason = pure_backend.statistics().calls, ""
    try:
        got = results(sample, device, lambda module: compiled(module, options={"on_impure": "error"}))
    except ImpureGraphError as error:
        reason = error.impurities[0].detail or str(error.impurities[0])
        torch._dynamo.reset()
        got = results(sample, device, compiled)
    assert list(want) == list(got)
    for name, leaf in want.items():
        same(leaf, got[name].cpu(), name, TOLERANCE)
    if reason:
        return Outcome("eager", first_line(reason))
    if pure_backend.statistics().calls == calls:
        return Outcome("no graph", "Dynamo runs it outside of graphs")
    return Outcome("passes")


def results(sample: Sample, device: Any, wrap: Any) -> dict[str, torch.Tensor]:
    """Outputs, gradients of inputs and parameters, and buffers afterwards, by name."""
    module = copy.deepcopy(sample.module).to(device)
    args, kwargs = move((sample.args, sample.kwargs), device)
    torch.manual_seed(0)
    outputs = wrap(module)(*args, **kwargs)
    leaves = {name: leaf for name, leaf in named_leaves(outputs, "output") if isinstance(leaf, torch.Tensor)}
    heads = [leaf for leaf in leaves.values() if leaf.requires_grad]
    if heads:
        torch.autograd.backward(
            heads, [torch.cos(torch.arange(t.numel(), dtype=t.dtype)).view(t.shape).to(device) for t in heads]
        )
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    named = itertools.chain(((f"input {i}", t) for i, t in enumerate(inputs)), module.named_parameters())
    leaves |= {f"gradient of {name}": t.grad for name, t in named if t.grad is not None}
    leaves |= {f"buffer {name}": t for name, t in module.named_buffers()}
    return {name: tensor.detach() for name, tensor in leaves.items()}


def cotangent(head: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.arange(head.numel(), dtype=head.dtype)).view(head.shape).to(head.device)


def move(arguments: Any, device: Any) -> Any:
    """Leaves with the same values on a device."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().to(device).requires_grad_(t.requires_grad), arguments
    )


def first_line(error: Any) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


CASES = [(name, train) for name, info in MODULES.items() for train in (True, False) if train or info.train_and_eval_differ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of deprecated arguments and nested tensors
@pytest.mark.parametrize(
    ("name", "train"), CASES, ids=lambda case: case if isinstance(case, str) else "train" if case else "eval"
)
def test_module(name, train):
    """The first inputs of a module: equal to eager."""
    outcome = judge(next(samples(name, train)))
    if outcome.how == "refused":  # FractionalMaxPool: the database's random samples are doubles
        pytest.skip(outcome.reason)
    assert outcome.how in ("passes", "eager", "no graph"), outcome.reason


def table(names: list[str]) -> Iterator[str]:
    """A row for each module and mode, in Markdown."""
    for name, train in itertools.product(names or MODULES, (True, False)):
        outcomes = [_outcome(sample) for sample in samples(name, train)]
        counts = {how: sum(o.how == how for o in outcomes) for how in dict.fromkeys(o.how for o in outcomes)}
        reasons = dict.fromkeys(f"{o.how}: {o.reason[:300]}" for o in outcomes if o.how != "passes")
        yield f"| {name} | {'train' if train else 'eval'} | {counts} | {'; '.join(reasons)} |"


def _outcome(sample: Sample) -> Outcome:
    torch._dynamo.reset()
    pure_backend.clear_caches()
    try:
        return judge(sample)
    except Exception as error:
        return Outcome("FAILS", f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for row in table(sys.argv[1:]):
        print(row, flush=True)
