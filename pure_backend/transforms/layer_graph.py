"""The graph of one layer as a function of its parameters, buffers and inputs.

A loop's body may not swap a module's parameters (`functional_call`) where Dynamo traces it, but it may call a graph that takes
them as inputs. So the layer is captured on its own first: Dynamo hands its graph to a backend, and one call on real tensors
shows which input of the graph is which tensor, and where each result goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.transforms.capture import Captured


@dataclasses.dataclass(frozen=True, eq=False)
class LayerGraph:
    """A captured function of flat tensors.

    Attributes:
        gm: Its graph.
        inputs: For each input of the graph the position of the leaf that it is, or the tensor itself if it is none of them.
        outputs: For each leaf of the result the position of the graph's output, that of an input leaf (as `~position`), or a
            constant.
        out_spec: The structure of the result.
    """

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    out_spec: pytree.TreeSpec

    def __call__(self, *leaves: torch.Tensor) -> Any:
        """The function's result."""
        results = self.gm(*[leaves[i] if isinstance(i, int) else i for i in self.inputs])
        filled = [_pick(o, results, leaves) for o in self.outputs]
        return pytree.tree_unflatten(filled, self.out_spec)


def _pick(output: Any, results: Sequence[Any], leaves: Sequence[Any]) -> Any:
    if not isinstance(output, int) or isinstance(output, bool):
        return output.value
    return results[output] if output >= 0 else leaves[~output]


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: Any


def capture(fn: Callable[..., Any], leaves: Sequence[torch.Tensor]) -> LayerGraph:
    """Capture `fn(*leaves)`; it is run once.

    Raises:
        torch._dynamo.exc.Unsupported: Dynamo cannot capture it whole.
    """
    seen: dict[str, Any] = {}

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen["gm"], seen["args"], seen["results"] = gm, args, gm(*args)
            return seen["results"]

        return run

    distinct = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    with torch.random.fork_rng(devices=[]):  # a later call is to draw what it would have drawn without this one
        result = Captured(backend=backend, dynamic=False)(fn, *distinct)
    flat, spec = pytree.tree_flatten(result)
    if not seen:
        raise ValueError("the layer computes nothing")
    gm, given, results = seen.pop("gm"), seen.pop("args"), seen.pop("results")  # Dynamo may keep the backend for its reset
    inputs = tuple(_position(arg, distinct, arg) for arg in given)
    outputs = []
    for leaf in flat:
        position = _position(leaf, results, None)
        if position is None:
            own = _position(leaf, distinct, None)
            position = _Constant(leaf) if own is None else ~own
        outputs.append(position)
    return LayerGraph(gm, inputs, tuple(outputs), spec)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _position(tensor: Any, among: Sequence[Any], default: Any) -> Any:
    return next((i for i, other in enumerate(among) if other is tensor), default)
