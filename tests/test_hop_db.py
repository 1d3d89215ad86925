"""Torch's own database of higher-order operators (`torch.testing._internal.hop_db`), compiled against eager.

`python tests/test_hop_db.py [xla]` prints a table: each entry passes (in one program), is left to eager for the reason given,
is refused by torch itself on that device, or never gets into a graph.
"""

import dataclasses
import sys
import warnings

import pytest
import torch
from oracle import compiled, named_leaves, same
from torch.utils import _pytree as pytree

import pure_backend
from pure_backend import ImpureGraphError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.hop_db import hop_db

ENTRIES = {f"{entry.name}-{entry.variant_test_name}": entry for entry in hop_db}

# Every other entry is one program.
LEFT_TO_EAGER = {
    "while_loop_stack_output-simple": "size is not known",
    "auto_functionalize-simple": "no JAX implementation",
}
# What torch does not run on these devices, or does not put into a graph, whatever the backend.
REFUSED = ("torch refuses", "no graph")
# In eager on xla tensors torch 2.9 gives it a result that is still wrapped for functionalization.
BROKEN_ON_XLA = ("while_loop_stack_output-simple",)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one entry went: `passes`, `eager`, `torch refuses` or `no graph`, and why."""

    how: str
    reason: str = ""


def samples(entry, requires_grad):
    """Fresh arguments of each sample of an entry."""
    return [(s.input, *s.args) for s in entry.sample_inputs("cpu", torch.float32, requires_grad=requires_grad)]


def judge(entry, requires_grad, device="cpu"):
    """Run an entry eagerly on the CPU and compiled on a device.

    Raises:
        AssertionError: The two differ.
    """
    reason, calls = "", pure_backend.statistics().calls
    for args in samples(entry, requires_grad):
        torch._dynamo.reset()
        try:
            want = results(entry.op, move(args, "cpu"), requires_grad)
            results(entry.op, move(args, device), requires_grad)
        except Exception as error:
            return Outcome("torch refuses", first_line(error))
        torch._dynamo.reset()
        try:
            got = results(compiled(entry.op, options={"on_impure": "error"}), move(args, device), requires_grad)
        except ImpureGraphError as error:
            reason = error.impurities[0].detail
            torch._dynamo.reset()
            got = results(compiled(entry.op), move(args, device), requires_grad)
        assert list(want) == list(got)
        for name in want:
            same(want[name], got[name].cpu(), name)
    if reason:
        return Outcome("eager", first_line(reason))
    if pure_backend.statistics().calls == calls:
        return Outcome("no graph", "Dynamo runs it outside of graphs")
    return Outcome("passes")


def results(f, args, requires_grad):
    """Outputs, arguments afterwards, and gradients, by name."""
    torch.manual_seed(0)
    outputs = f(*args)
    named = [*named_leaves(outputs, "output"), *named_leaves(args, "argument")]
    leaves = {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}
    if requires_grad:
        heads = [t for n, t in leaves.items() if n.startswith("output") and t.requires_grad]
        torch.autograd.backward(heads, [torch.ones_like(t) for t in heads])
        inputs = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        leaves |= {f"gradient {i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}
    return {name: tensor.detach() for name, tensor in leaves.items()}


def move(args, device):
    """Copies on a device; a function or a block mask is passed as it is."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device).requires_grad_(t.requires_grad), args)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


CASES = [(name, grad) for name, entry in ENTRIES.items() for grad in (False, True) if entry.supports_autograd or not grad]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of unfused attention and of Dynamo
@pytest.mark.parametrize(("name", "requires_grad"), CASES)
def test_entry(name, requires_grad, device):
    """An entry is one program, or left to eager for the reason that we know of."""
    if device.type == "xla" and name in BROKEN_ON_XLA:
        pytest.skip("torch's own result is broken on xla")
    outcome = judge(ENTRIES[name], requires_grad, device)
    if outcome.how in REFUSED:
        pytest.skip(f"{outcome.how}: {outcome.reason}")
    assert outcome.how == ("eager" if name in LEFT_TO_EAGER else "passes"), outcome.reason
    assert LEFT_TO_EAGER.get(name, "") in outcome.reason


def table(device="cpu"):
    """A row for each entry, in Markdown."""
    for name, requires_grad in CASES:
        try:
            outcome = judge(ENTRIES[name], requires_grad, device)
        except Exception as error:
            outcome = Outcome("FAILS", f"{type(error).__name__}: {first_line(error)}")
        yield f"| {name} | {'gradient' if requires_grad else 'forward'} | {outcome.how} | {outcome.reason[:160]} |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import torch_xla

        torch_xla.device()
    for row in table(*sys.argv[1:]):
        print(row, flush=True)
