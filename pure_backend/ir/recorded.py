"""An ATen graph in which gradients flow as they did in the function it was made of.

`make_fx` sees operators below autograd: a `detach`, `detach_` or `no_grad` inside the function leaves no trace there, or one
that looks like the detaching of what autograd saves for itself. But the tensors that an operator is given still say whether
autograd follows them. So where one is not followed, the operator is given a `detach` of it.

    torch.vmap(lambda t: t * t.detach())(x)  ->  %y = aten.detach(x); %cut = torch.detach(y); %z = aten.mul(x, cut)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary


def aten_graph(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The ATen graph of a function.

    Args:
        function: It takes and gives tensors.
        tensors: Fake tensors. Where some require a gradient, the graph has a `torch.detach` at each use of a value that
            autograd does not follow although it was made from them, its writes are in the grad mode that they were in, and the
            values that carry a gradient (`node.meta["val"]`) require one.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return make_fx(function)(*tensors)

    mode = _Followed()

    def followed(*args):
        with mode, mode.in_place:
            results = function(*args)
            return pytree.tree_map_only(torch.Tensor, mode.cut, results)

    gm = make_fx(followed)(*tensors)
    unrecorded, in_place = ({node.name for node in nodes} for nodes in (mode.unrecorded, mode.cuts_in_place))
    _mark_followed(gm, [tensor.requires_grad for tensor in tensors], unrecorded, in_place)
    return gm


def followable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, with memory and history of its own; no leaf, so that it may be written."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if not torch.is_grad_enabled() or not tensor.requires_grad:
        return like
    written: Any = _NoLeaf.apply(like.requires_grad_())
    return written


class _NoLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)


class _Followed(TorchDispatchMode):
    """Shows in the traced graph which tensors autograd does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.unrecorded: set[fx.Node] = set()
        self.cuts_in_place: set[fx.Node] = set()
        self.in_place = _DetachedInPlace()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """As torch's own modes: for others torch sets a flag of the process, which threads leave set, and Dynamo then rests."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        places = func._schema.arguments
        seen = [self.cut_all(arg) if place.alias_info is None else arg for arg, place in zip(args, places, strict=False)]
        named = {place.name for place in places if place.alias_info is not None}
        kwargs = {name: arg if name in named else self.cut_all(arg) for name, arg in (kwargs or {}).items()}
        if torch.is_grad_enabled():
            return func(*seen, **kwargs)
        # A write says by itself whether it is recorded. Other results say it when they are used: those of the forward of an
        # `autograd.Function`, which runs with recording off too, are followed.
        last = self.switch(False) if func._schema.is_mutable else next(iter(reversed(self.graph.nodes)))
        result = func(*seen, **kwargs)
        self.unrecorded.update(_after(last))
        if func._schema.is_mutable:
            self.switch(True)
        return result

    def cut_all(self, arg: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self.cut, arg)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a `detach` of it in the graph if autograd does not follow it."""
        if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        last = next(iter(reversed(self.graph.nodes)))
        result = torch.ops.aten.alias.default(tensor)
        for node in _after(last):
            if node.target is torch.ops.aten.alias.default:
                node.target = torch.detach
                self.cuts_in_place |= {node} if tensor in self.in_place.tensors else set()
        return result

    def switch(self, grad: bool) -> fx.Node:
        return self.graph.call_function(torch._C._set_grad_enabled, (grad,))

    @property
    def graph(self) -> fx.Graph:
        mode: Any = get_proxy_mode()
        return mode.tracer.graph


class _DetachedInPlace(TorchFunctionMode):
    """Notes what `detach_` is called on: below autograd nothing happens then."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.Tensor.detach_, torch.detach_):
            self.tensors[args[0]] = True
        return func(*args, **(kwargs or {}))


def _after(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a graph behind one of them."""
    while node.next.op != "root":
        node = node.next
        yield node


def _mark_followed(gm: fx.GraphModule, followed: Sequence[bool], unrecorded: set[str], in_place: set[str]) -> None:
    """Let values that carry a gradient require one; erase each `detach` that is not needed.

    It is for values that were detached or made while autograd did not record, and for views of such. What an operator's own
    kernel makes on its way is not followed either, but the operator is.
    """
    lost: set[fx.Node] = set()
    carries: dict[fx.Node, bool] = dict(zip(gm.graph.find_nodes(op="placeholder", sort=True), followed, strict=True))
    for node in list(gm.graph.nodes):
        if node.target is torch.detach:
            (origin,) = node.args
            carries[node] = False
            if not node.users or not carries[origin] or not (origin in lost or node.name in in_place):
                node.replace_all_uses_with(origin)
                gm.graph.erase_node(node)
        elif node.op != "placeholder":
            if node.target is torch.ops.aten.detach.default or node.name in unrecorded or _views(node) & lost:
                lost.add(node)
            carries[node] = any(carries[arg] for arg in node.all_input_nodes)
            for arg in node.all_input_nodes if _writes(node) else ():
                carries[arg] = carries[node]
    for node in (node for node, here in carries.items() if here):
        pytree.tree_map_only(torch.Tensor, _require, node.meta.get("val"))
    gm.recompile()


def _require(value: torch.Tensor) -> None:
    if value.is_floating_point() or value.is_complex():
        value.requires_grad_()


def _views(node: fx.Node) -> set[fx.Node]:
    """What a node's value is a view, or a part, of."""
    if node.target is operator.getitem:
        return set(node.all_input_nodes)
    places = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    return {arg for arg, place in zip(node.args, places, strict=False) if place.alias_info and isinstance(arg, fx.Node)}


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
