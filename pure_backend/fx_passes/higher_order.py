"""Higher-order operators during propagation: run the operator on fakes, and its bodies too, so that their nodes have facts.

Each entry is `fn(args, kwargs, run_body) -> (value, bodies)`. There are two sorts. An operator that *is* its body (a
checkpoint, a nested compile region) has the value that the body gives for its operands, so views and gradients pass through it
as in eager. An operator that calls its bodies apart (a branch, a loop, an `autograd.Function`) runs them on `_stand_ins`, and
its results hang on the operands by one autograd node (`_linked`): that is what eager has, and what says which inputs get a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.errors import UnsupportedOperatorError
from pure_backend.fx_passes.selective import mark_saved
from pure_backend.ir.describe import source_line, target_name
from pure_backend.ir.facts import facts
from pure_backend.ir.modes import modes_kept

Result = tuple[Any, tuple[fx.GraphModule, ...]]
RunBody = Callable[[fx.GraphModule, Any], tuple[fx.GraphModule, Any]]


def propagate(node: fx.Node, args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    """The value of a higher-order operator on fake arguments, and its propagated bodies.

    Raises:
        UnsupportedOperatorError: The operator, or what a body of it does, has no lowering.
    """
    name = node.target.name()
    known = _INLINED.get(name) or _APART.get(name)
    if known is None:
        reason = _REASONS.get(name, "has no JAX lowering")
        raise UnsupportedOperatorError(f"the higher-order operator {name} {reason}\n  at {source_line(node)}")
    refuse_runtime_scalars(node)
    with modes_kept():
        value, bodies = known(args, kwargs, run_body)
    for body in bodies if name in _APART else ():
        _refuse_writes_to_inputs(body)
    return value, bodies


# ---------------------------------------------------------------------------------------------- operators that are their body


def _inlined(body_at: int) -> Callable[[tuple, dict, RunBody], Result]:
    """An operator whose arguments from position `body_at` on are its body and the body's operands."""

    def propagate_inlined(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
        copy, value = run_body(args[body_at], args[body_at + 1 :])
        return value, (copy,)

    return propagate_inlined


def _inlined_packed(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    """A body, and its operands in one tuple."""
    copy, value = run_body(args[0], args[1])
    return value, (copy,)


def _invoke_subgraph(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    body, _, *operands = args
    copy, value = run_body(body, operands)
    return value, (copy,)


def _checkpoint(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    body, *operands = args
    copy, value = run_body(body, operands)
    if (context_fn := body.meta.get("_checkpoint_context_fn")) is not None:
        mark_saved(copy, _stand_ins(operands), context_fn)
    return value, (copy,)


def _with_grad_mode(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    enabled, body, *operands = args
    with torch.set_grad_enabled(enabled):
        copy, value = run_body(body, operands)
    return value, (copy,)


def _with_autocast(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    device, dtype, enabled, _, body, *operands = args
    with torch.autocast(device, dtype, enabled, cache_enabled=False):
        copy, value = run_body(body, operands)
    return value, (copy,)


def _out_dtype(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    """`out_dtype(op, dtype, *args)`: the operator on arguments of the result's dtype."""
    op, dtype, *operands = args
    graph = fx.Graph()
    inputs = [graph.placeholder(f"arg{i}") for i in range(len(operands))]
    cast = [
        graph.call_method("to", (node, dtype)) if isinstance(operand, torch.Tensor) else operand
        for node, operand in zip(inputs, operands, strict=True)
    ]
    graph.output((graph.call_function(op, tuple(cast)),))
    copy, (value,) = run_body(fx.GraphModule({}, graph), operands)
    return value, (copy,)


# --------------------------------------------------------------------------------------- operators that call their bodies apart


def _cond(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    _, true, false, operands = args
    true_copy, value = run_body(true, _stand_ins_as_they_are(operands))
    false_copy, other = run_body(false, _stand_ins_as_they_are(operands))
    if _shapes(value) != _shapes(other):
        raise UnsupportedOperatorError(f"the branches of torch.cond give {_shapes(value)} and {_shapes(other)}")
    return _linked(value, operands), (true_copy, false_copy)


def _while_loop(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    condition, body, carried, additional = args
    if torch.is_grad_enabled() and any(map(_requires_grad, (*carried, *additional))):
        raise UnsupportedOperatorError(
            "while_loop with an input that requires grad: JAX has no backward of a loop whose number of steps is not known; "
            "use scan, or run it under torch.no_grad()"
        )
    if not all(isinstance(carry, torch.Tensor) for carry in carried):
        raise UnsupportedOperatorError("while_loop carries a Python number")
    condition_copy, _ = run_body(condition, _stand_ins((*carried, *additional)))
    body_copy, value = run_body(body, _stand_ins((*carried, *additional)))
    _refuse_other_carry("while_loop", carried, value)
    return _linked(tuple(value), (*carried, *additional)), (condition_copy, body_copy)


def _scan(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    combine, init, xs, additional = args
    operands = (*init, *xs, *additional)
    length = xs[0].shape[0]
    carries = _stand_ins(init, any(map(_requires_grad, operands)))
    copy, value = run_body(combine, [*carries, *_stand_ins_as_they_are((*(x[0] for x in xs), *additional))])
    carry, ys = value[: len(init)], value[len(init) :]
    _refuse_other_carry("scan", init, carry)
    return _linked((*carry, *(_stacked(y, length) for y in ys)), operands), (copy,)


def _map(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    body, xs, additional = args
    copy, value = run_body(body, _stand_ins_as_they_are((*(x[0] for x in xs), *additional)))
    stacked = tuple(_stacked(y, xs[0].shape[0]) for y in value)
    return _linked(stacked, (*xs, *additional)), (copy,)


def _associative_scan(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    combine, xs, additional = args
    elements = [x[0] for x in xs]
    needs_grad = any(map(_requires_grad, (*xs, *additional)))
    stand_ins = [*_stand_ins((*elements, *elements), needs_grad), *_stand_ins_as_they_are(additional)]
    copy, value = run_body(combine, stand_ins)
    _refuse_other_carry("associative_scan", elements, value)
    return _linked(tuple(xs), (*xs, *additional)), (copy,)


def _flex_attention(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    query, key, value, score_mod, block_mask, _, _, *buffers = args
    tensors = (query, key, value, *buffers[0])
    bodies = _score_bodies(query, score_mod, block_mask[-1], *buffers, any(map(_requires_grad, tensors)), run_body)
    rows = query.new_empty(query.shape[:-1], dtype=_score_dtype(query))
    out, lse = _linked((query.new_empty((*query.shape[:-1], value.shape[-1])), rows), tensors)
    return (out, lse, torch.empty_like(rows)), bodies


def _flex_attention_backward(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    query, key, value = args[:3]
    score_mod, _, block_mask, _, _, *buffers = args[7:]
    if buffers[0]:
        raise UnsupportedOperatorError("flex_attention_backward with buffers of a score_mod has no JAX lowering")
    bodies = _score_bodies(query, score_mod, block_mask[-1], *buffers, True, run_body)
    return (*(torch.empty_like(tensor) for tensor in (query, key, value)), ()), bodies


def _score_bodies(
    query: torch.Tensor,
    score_mod: fx.GraphModule,
    mask_mod: fx.GraphModule,
    score_buffers: tuple,
    mask_buffers: tuple,
    needs_grad: bool,
    run_body: RunBody,
) -> tuple[fx.GraphModule, ...]:
    """The functions of one score, and of its batch, head, query and key position."""
    score = query.new_empty((), dtype=_score_dtype(query))
    places = [query.new_empty((), dtype=torch.int32) for _ in range(4)]
    score_copy, _ = run_body(score_mod, _stand_ins((score, *places, *score_buffers), needs_grad))
    mask_copy, _ = run_body(mask_mod, _stand_ins((*places, *mask_buffers)))
    return score_copy, mask_copy


def _score_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


def _autograd_function(args: tuple, kwargs: dict, run_body: RunBody) -> Result:
    """The user's own forward and backward. An input whose gradient the backward does not give gets none, as in eager."""
    forward, backward, *operands = args
    with torch.no_grad():
        forward_copy, (results, saved) = run_body(forward, _with_context(forward, _stand_ins(operands)))
    cotangents = _stand_ins(pytree.tree_leaves(results), True)
    with torch.enable_grad():  # for a second derivative: the backward is differentiated in its turn
        backward = _without_grad_mode(backward)
        backward_copy, grads = run_body(backward, _with_context(backward, [*cotangents, *_stand_ins(saved, True)]))
    count = sum(kwargs["args_tensor_mask"]) if "args_tensor_mask" in kwargs else len(operands)
    reached = [operand for operand, grad in zip(operands[:count], pytree.tree_leaves(grads), strict=False) if grad is not None]
    if any(map(_requires_grad, operands[:count])):
        reached.append(torch.empty(0, requires_grad=True))  # the results carry a gradient, even if it reaches no operand
    value = _linked(results, reached, kwargs["non_differentiable_idx"])
    return value, (forward_copy, backward_copy)


def _with_context(body: fx.GraphModule, operands: list) -> list:
    """The operands, behind a None for the `ctx` argument that bodies have before torch 2.13."""
    expected = len(body.graph.find_nodes(op="placeholder"))
    return [None] * (expected - len(operands)) + list(operands)


def _without_grad_mode(body: fx.GraphModule) -> fx.GraphModule:
    """A backward without the nodes by which Dynamo runs all of it under `no_grad`."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, mapping))
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    switches = [node for node in calls if node.target is torch._C._set_grad_enabled]
    if len(switches) == 2 and calls[0] is switches[0] and calls[-1] is switches[1] and switches[0].args == (False,):
        for node in switches:
            graph.erase_node(node)
    return fx.GraphModule(body, graph)


# ------------------------------------------------------------------------------------------------------------------ stand-ins


def _stand_ins(operands: Sequence[Any], needs_grad: bool | None = None) -> list[Any]:
    """Operands for a body that is run apart: the same sizes and strides, memory and history of their own.

    If one of them requires grad, all do, since in a loop the results of one step are the operands of the next.
    """
    needs_grad = any(map(_requires_grad, operands)) if needs_grad is None else needs_grad
    return [_stand_in(operand, needs_grad) if isinstance(operand, torch.Tensor) else operand for operand in operands]


def _stand_ins_as_they_are(operands: Sequence[Any]) -> list[Any]:
    """Stand-ins that require a gradient where the operand does: some operators take none (running statistics)."""
    return [stand_in for operand in operands for stand_in in _stand_ins([operand])]


def _stand_in(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    if not needs_grad or not _is_inexact(tensor):
        return _fresh(tensor)
    leaf = _fresh(tensor).requires_grad_()
    return _linked(leaf, [leaf]) if torch.is_grad_enabled() else leaf


def _linked(results: Any, operands: Sequence[Any], without_grad: Sequence[int] = ()) -> Any:
    """Fresh results that one autograd node connects with all operands, as those of an eager higher-order operator."""
    leaves, spec = pytree.tree_flatten(results)
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    return pytree.tree_unflatten(list(_Link.apply(leaves, without_grad, *tensors)), spec)


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves: list[Any], without_grad: Sequence[int], *operands: torch.Tensor) -> tuple:
        results = [_fresh(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        fixed = [r for i, r in enumerate(results) if isinstance(r, torch.Tensor) and (i in without_grad or not _is_inexact(r))]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _stacked(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.empty((length, *tensor.shape), dtype=tensor.dtype, device=tensor.device)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _shapes(results: Any) -> list[Any]:
    leaves = pytree.tree_leaves(results)
    return [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in leaves]


# -------------------------------------------------------------------------------------------------------------------- refusals


def _refuse_other_carry(name: str, before: Sequence[Any], after: Sequence[Any]) -> None:
    if _shapes(before) != _shapes(after):
        raise UnsupportedOperatorError(f"{name} carries {_shapes(before)} but its body gives {_shapes(after)}")


def refuse_runtime_scalars(node: fx.Node) -> None:
    """A float that changes from call to call enters a graph as `item()` of a tensor; a body would take its sample for it."""
    floats = [arg for arg in node.all_input_nodes if isinstance(facts(arg).value, float) and arg.op != "placeholder"]
    if floats:
        raise UnsupportedOperatorError(
            f"{target_name(node.target)} is given the Python float {floats[0].name}, which changes from call to call: "
            f"pass a tensor\n"
            f"  at {source_line(node)}"
        )


def _refuse_writes_to_inputs(body: fx.GraphModule) -> None:
    inputs = {known.storage for p in body.graph.find_nodes(op="placeholder") if (known := facts(p).geometry) is not None}
    for node in body.graph.nodes:
        if any(facts(arg).geometry.storage in inputs for arg in facts(node).writes):
            raise UnsupportedOperatorError(
                f"the body of a higher-order operator writes one of its inputs\n  at {source_line(node)}"
            )


_INLINED: dict[str, Callable[[tuple, dict, RunBody], Result]] = {
    "hints_wrapper": _inlined_packed,
    "invoke_quant": _inlined(0),
    "invoke_quant_packed": _inlined(0),
    "invoke_subgraph": _invoke_subgraph,
    "out_dtype": _out_dtype,
    "run_const_graph": _inlined_packed,
    "strict_mode": _inlined_packed,
    "tag_activation_checkpoint": _checkpoint,
    "wrap": _inlined(0),
    "wrap_activation_checkpoint": _checkpoint,
    "wrap_with_autocast": _with_autocast,
    "wrap_with_set_grad_enabled": _with_grad_mode,
}

_APART: dict[str, Callable[[tuple, dict, RunBody], Result]] = {
    "associative_scan": _associative_scan,
    "autograd_function_apply": _autograd_function,
    "cond": _cond,
    "flex_attention": _flex_attention,
    "flex_attention_backward": _flex_attention_backward,
    "map_impl": _map,
    "scan": _scan,
    "while_loop": _while_loop,
}

_REASONS = {
    "while_loop_stack_output": "has a result whose size is not known before it has run",
    "register_hook": "changes the gradient of a tensor that others may use",
}
