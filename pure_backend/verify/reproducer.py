"""One node as a Python file that shows how it differs from eager: source and tensors, no pickled code."""

from __future__ import annotations

import os
import re
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.ir.describe import describe_node
from pure_backend.ir.facts import facts
from pure_backend.ir.functional_ops import Functionalized
from pure_backend.ir.geometry import Geometry

_FILE = '''"""{title}

{difference}
Run this file: it raises where the compiled node still differs from eager.
"""

from pathlib import Path

{imports}
import pure_backend  # noqa: F401


{source}

def run(function):
    """Outputs, and the gradients of all inputs that have one, on fresh copies of the saved inputs."""
    inputs = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=True)
    torch.manual_seed(0)
    outputs = [leaf for leaf in function(*inputs) if isinstance(leaf, torch.Tensor)]
    heads = [output for output in outputs if output.requires_grad]
    if heads:
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(head.shape, dtype=head.dtype, generator=generator) for head in heads]
        torch.autograd.backward(heads, cotangents)
    return outputs, [x.grad for x in inputs if isinstance(x, torch.Tensor)]


if __name__ == "__main__":
    eager, eager_gradients = run(node)
    compiled, gradients = run(torch.compile(node, backend="assume_pure"))
    torch.testing.assert_close(compiled, eager, equal_nan=True{tolerance})
    for ours, theirs in zip(gradients, eager_gradients, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, equal_nan=True{tolerance})
    print("compiled agrees with eager")
'''


def write_reproducer(folder: str | os.PathLike[str], node: fx.Node, args: tuple, kwargs: dict, difference: str) -> Path | None:
    """Write `reproduce.py` and `inputs.pt` into a folder of their own.

    Args:
        folder: Where to make that folder.
        node: The node, of a functional graph.
        args: Its arguments in eager.
        kwargs: Its keyword arguments.
        difference: What differs, in words.

    Returns:
        The path of `reproduce.py`, or None for a node with graphs or views inside, which is no call of torch.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if any(isinstance(leaf, (fx.GraphModule, Geometry)) for leaf in leaves) or _has_geometry((args, kwargs)):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    inputs = [_saved(tensor, node) for tensor in tensors]
    place = _new_folder(Path(folder), node.name)
    torch.save(inputs, place / "inputs.pt")
    imports, source = _source(node, leaves, spec)
    title, difference = (text.replace("\\", "\\\\").replace('"""', "'''") for text in (describe_node(node), difference))
    text = _FILE.format(title=title, difference=difference, imports=imports, source=source, tolerance=_tolerance(inputs))
    path = place / "reproduce.py"
    path.write_text(text, encoding="utf-8")
    return path


def _has_geometry(value: Any) -> bool:
    if isinstance(value, (Geometry, fx.GraphModule)):
        return True
    value = list(value.values()) if isinstance(value, dict) else value
    return isinstance(value, (tuple, list)) and any(map(_has_geometry, value))


def _saved(tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """A copy on the CPU; it requires grad where the node's autograd recorded."""
    copy = tensor.detach().cpu().resolve_conj().resolve_neg().clone()
    recorded = facts(node).grad and (copy.is_floating_point() or copy.is_complex())
    return copy.requires_grad_(recorded)


def _new_folder(parent: Path, name: str) -> Path:
    for number in range(1000):
        place = parent / (f"{name}_{number}" if number else name)
        if not place.exists():
            place.mkdir(parents=True)
            return place
    raise FileExistsError(f"{parent} holds a thousand reproducers of {name!r}: empty it")


def _tolerance(inputs: list[torch.Tensor]) -> str:
    """torch's own tolerances are for one operator in its usual order of summation; ours may sum in another."""
    single = any(tensor.dtype in (torch.float32, torch.complex64) for tensor in inputs)
    return ", rtol=1e-4, atol=1e-5" if single else ""


def _source(node: fx.Node, leaves: list[Any], spec: pytree.TreeSpec) -> tuple[str, str]:
    """The import lines, and a function of the tensors that calls the node and returns a tuple."""
    graph = fx.Graph()
    numbers = iter(range(len(leaves)))
    filled = [graph.placeholder(f"x{next(numbers)}") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    target, written = node.target, []
    if isinstance(target, Functionalized):
        target, tensors = target.op, [leaf for leaf in filled if isinstance(leaf, fx.Node)]
        copies = {tensor: graph.call_method("clone", (tensor,)) for tensor in tensors}
        written = [copies[tensors[w]] for w in node.target.writes]
        filled = [copies[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in filled]
    args, kwargs = pytree.tree_unflatten(filled, spec)
    op = "call_method" if isinstance(target, str) else "call_function"
    result = graph.create_node(op, target, args, kwargs)
    graph.output(tuple(written) if written else _results(graph, result, node))
    code = graph.python_code("self")
    source = re.sub(r"def forward\(self(, )?", "def node(", code.src.strip("\n")).rstrip() + "\n"
    names = [name for name in code.globals if re.search(rf"\b{re.escape(name)}\b", source)]
    lines = {_import_line(name, code.globals[name]) for name in names} | {"import torch"}
    return "\n".join(sorted(lines)), source


def _results(graph: fx.Graph, result: fx.Node, node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors of a result, copied: a view that is returned would be made again outside of the program."""
    value = facts(node).value
    if not isinstance(value, (tuple, list)):
        return (graph.call_method("clone", (result,)),)
    tensors = [i for i, part in enumerate(value) if isinstance(part, torch.Tensor)]
    return tuple(graph.call_method("clone", (graph.call_function(getitem, (result, i)),)) for i in tensors)


def _import_line(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"import {value.__name__}" if name == value.__name__.split(".")[0] else f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f"from math import {name}"
    if value is type(None):
        return "from types import NoneType"
    qualified = getattr(value, "__qualname__", name)
    return f"from {value.__module__} import {qualified}" + (f" as {name}" if qualified != name else "")
