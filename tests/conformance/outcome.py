"""One case from end to end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

import pure_backend

from .cases import Case, entries, function_of, sample_of
from .compare import difference
from .graphs import Call, call_of, is_torch_function, through_backend, through_dynamo, twins
from .latitude import Latitude, latitude
from .observe import Observed, observe
from .points import as_xla_computes, filled, fillings

_WIDER = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        case: The case.
        kind: "compiled": equal to eager; "eager": left to eager, for a reason; "wrong"; "raised"; "skipped": eager raises.
        detail: The reason, the difference or the error.
    """

    case: Case
    kind: str
    detail: str = ""


def run(case: Case, sample: SampleInput | None = None) -> Outcome:
    """Run a case on both sides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the operators' own; both sides give them
        sample = sample_of(case) if sample is None else sample
        call = call_of(function_of(case), _without_grad(sample) if case.inplace else sample)
        free = latitude(case, sample)
        want = _eager(call, free)
        if want is None:
            return Outcome(case, "skipped", "eager raises")
        return _against(case, call, free, want, _compiled(case, call, want.result))


def run_at_points(case: Case, sample: SampleInput, names: Iterable[str]) -> Iterator[Outcome]:
    """Run a case with its sample filled with each of several kinds of special points; compiled once."""
    made = fillings(entries()[case.op])
    run_compiled = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            at = dataclasses.replace(case, points=name)
            at_points = filled(sample, made[name])
            call = call_of(function_of(case), at_points)
            free = latitude(at, at_points)
            if free.undetermined:
                continue
            with as_xla_computes(name):
                want = _eager(call, free)
                if want is None:
                    continue
                run_compiled = run_compiled or _compiled(at, call, want.result)
                yield _against(at, call, free, want, run_compiled)


def _without_grad(sample: SampleInput) -> SampleInput:
    """Leaves that require grad cannot be written in place."""
    return sample.transform(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)


def _eager(call: Call, free: Latitude) -> Observed | None:
    """Eager's side; without gradients where it has none for this sample; None where it raises."""
    for grad in (True, False):
        try:
            return observe(call, twins(call.tensors), free, grad)
        except Exception:  # whatever torch raises, it is no oracle here
            continue
    return None


def _compiled(case: Case, call: Call, example: Any) -> Callable[..., Any]:
    """The call compiled, its result in the structure of the example."""
    spec = pytree.tree_structure(example)
    dynamo = case.dynamo or not is_torch_function(call.op)
    run_compiled = through_dynamo(call) if dynamo else through_backend(call, example)
    return lambda *tensors: pytree.tree_unflatten(run_compiled(*tensors), spec)


def _against(case: Case, call: Call, free: Latitude, want: Observed, compiled: Callable[..., Any]) -> Outcome:
    with _reasons() as reasons:
        try:
            got = observe(compiled, twins(call.tensors), free, grad=bool(want.grads))
        except Exception as error:
            return Outcome(case, "raised", f"{type(error).__name__}: {str(error)[:600]}")
    text = difference(entries()[case.op], want, got, lambda: _in_double(call, free))
    if text is not None:
        return Outcome(case, "wrong", text)
    return Outcome(case, "eager", reasons[0]) if reasons else Outcome(case, "compiled")


@contextlib.contextmanager
def _reasons() -> Iterator[list[str]]:
    """Why nodes are left to eager meanwhile: the backend logs each decision."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.extend(map(_plain, re.findall(_REASON, record.getMessage())))
    logger = logging.getLogger("pure_backend")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield found
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


# "- op (kind) at file:line: detail" in a list of impure nodes, or a whole graph's one reason.
_REASON = r"(?m)^- .*? \((.*)|runs in eager: (.*)"


def _plain(groups: tuple[str, str]) -> str:
    """A reason without shapes and places, so that equal reasons are one."""
    listed, whole = groups
    kind, _, detail = listed.partition(")")
    detail = re.sub(r"^ at .*?:\d+", "", detail).lstrip(": ")
    text = f"{kind}: {detail}" if listed else whole
    return re.sub(r"\(.*| of shape.*", "", text).strip(" ,")


def _in_double(call: Call, free: Latitude) -> Observed | None:
    """Eager's side in double precision, for operators that take their dtype from their tensors."""
    wide = [t.detach().to(_WIDER.get(t.dtype, t.dtype)).requires_grad_(t.requires_grad) for t in call.tensors]
    try:
        return observe(call, wide, free)
    except Exception:  # not every operator has double precision
        return None


def forget() -> None:
    """Drop what was compiled, so that memory does not grow with the number of cases."""
    torch._dynamo.reset()
    pure_backend.clear_caches()
