"""`scan_layers`: a chain of equal layers as one loop, so that compilation does not grow with depth."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from pure_backend.calls.signature import signature
from pure_backend.ir.describe import describe_tensor
from pure_backend.ir.exact import exact
from pure_backend.transforms.capture import Captured
from pure_backend.transforms.layer_graph import LayerGraph, capture
from pure_backend.transforms.loops import scan

_LIMIT = 16


def scan_layers(layers: Sequence[nn.Module], x: Any, *extra: Any, checkpoint: bool = False) -> Any:
    """`for layer in layers: x = layer(x, *extra)` as one loop over stacked parameters.

    Args:
        layers: Modules of one class with parameters of equal shapes, in order. Parameters and buffers stay their own.
        x: What goes from layer to layer: a tensor, or a tuple of tensors if layers take and return one.
        *extra: What every layer is given besides (a mask, rotary tables).
        checkpoint: Keep only what goes from layer to layer for the backward, and compute each layer again in it.

    Returns:
        What the last layer returns, or `x` where there is none. Buffers that the layers write (running statistics) are
        written back to each. Inside `torch.compile` the layers are called one after the other, as part of the graph: the
        backend finds that they are equal, traces one, and makes a loop of them with `options={"repeats": "scan"}`. There they
        may differ.

    Raises:
        ValueError: Two layers differ in more than the values of parameters and buffers; the message has the first difference.
    """
    layers = list(layers)
    if not layers:
        return x
    if torch.compiler.is_compiling():
        return _one_by_one(layers, x, extra, checkpoint)
    _check_equal(layers)
    args = x if isinstance(x, tuple) else (x,)
    parameters = [name for name, _ in layers[0].named_parameters()]
    buffers = [name for name, _ in layers[0].named_buffers()]
    state = [[layer.get_parameter(n) for n in parameters] + [layer.get_buffer(n) for n in buffers] for layer in layers]
    graph = _graph(layers[0], parameters, buffers, state[0], args, extra)
    stacked = [torch.stack(tensors) for tensors in zip(*state, strict=True)]  # outside: one program for any depth
    captured = _captured.setdefault(graph, Captured())
    x, written = captured(_scan_layers, graph, stacked, len(layers), x, extra, len(parameters), checkpoint)
    with torch.no_grad():
        for position, values in enumerate(written, len(parameters)):
            for own, value in zip(state, values.unbind(), strict=True):
                own[position].copy_(value)
    return x


def _one_by_one(layers: list[nn.Module], x: Any, extra: tuple, checkpoint: bool) -> Any:
    for layer in layers:
        args = (*x, *extra) if isinstance(x, tuple) else (x, *extra)
        x = torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False) if checkpoint else layer(*args)
    return x


def _scan_layers(graph: LayerGraph, stacked: list, depth: int, x: Any, extra: tuple, parameters: int, checkpoint: bool) -> Any:
    def body(carry: Any, own: list[torch.Tensor]) -> tuple[Any, Any]:
        own = own[:parameters] + [buffer.detach().clone() for buffer in own[parameters:]]
        carry = graph(*own, *(carry if isinstance(carry, tuple) else (carry,)), *extra)
        return carry, own[parameters:]

    return scan(body, x, stacked, length=depth, checkpoint=checkpoint)


_graphs: weakref.WeakKeyDictionary[nn.Module, dict[Any, LayerGraph]] = weakref.WeakKeyDictionary()
_captured: weakref.WeakKeyDictionary[LayerGraph, Captured] = weakref.WeakKeyDictionary()


def _graph(
    layer: nn.Module, parameters: list[str], buffers: list[str], state: list[torch.Tensor], args: tuple, extra: tuple
) -> LayerGraph:
    """The layer's graph for these shapes and modes, captured when it is first needed."""
    count, leaves = len(state), [*state, *args, *extra]
    key = (signature(leaves), exact(tuple(_described(layer).items())))
    known = _graphs.setdefault(layer, {})
    if key not in known:
        names = parameters + buffers

        def call(*leaves: Any) -> Any:
            return torch.func.functional_call(layer, dict(zip(names, leaves[:count], strict=True)), leaves[count:])

        while len(known) >= _LIMIT:
            known.pop(next(iter(known)))
        known[key] = capture(call, leaves)
    return known[key]


def _check_equal(layers: list[nn.Module]) -> None:
    first = _described(layers[0])
    for i, layer in enumerate(layers[1:], 1):
        other = _described(layer)
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"scan_layers: layers 0 and {i} differ in {name}: {first.get(name)} and {other.get(name)}; one loop body "
                    "can stand for layers that differ in the values of their parameters and buffers only"
                )


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (int, float, str))


def _described(layer: nn.Module) -> dict[str, Any]:
    """All that one loop body has to share: classes, hyper-parameters, shapes, modes."""
    found: dict[str, Any] = {}
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        found[f"{prefix}class"] = type(module).__qualname__
        found |= {prefix + name: value for name, value in vars(module).items() if value is not None and _is_constant(value)}
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        found[name] = (describe_tensor(tensor), tensor.requires_grad, str(tensor.device))
    return found
