"""Nodes that hand wrappers to each other, as ATen graphs of the wrappers' plain tensors: a function, and its gradient."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pure_backend.errors import UnsupportedOperatorError
from pure_backend.fx_passes.split import Split, split
from pure_backend.ir.facts import facts
from pure_backend.ir.region import Region
from pure_backend.ir.wrapper import Structure, is_wrapper, pieces_of, spread, take_apart


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Some nodes of a propagated graph.

    Attributes:
        nodes: They, in order.
        inputs: The nodes before them whose tensors they take.
        outputs: Those of them that others use.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Stretch:
        """The stretch of these nodes."""
        inside = set(nodes)
        before = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside)
        inputs = tuple(arg for arg in before if isinstance(facts(arg).value, torch.Tensor))
        used = (node for node in nodes if any(user not in inside for user in node.users))
        return cls(tuple(nodes), inputs, tuple(node for node in used if isinstance(facts(node).value, torch.Tensor)))

    @property
    def recorded(self) -> bool:
        """Whether autograd records a result."""
        return any(requires_grad(node) for node in self.outputs)

    @property
    def shares_memory(self) -> bool:
        """Whether an output lies in the memory of an input or of another output."""
        inputs = {piece.untyped_storage()._cdata for piece in self.pieces}
        outputs = [piece.untyped_storage()._cdata for piece in pieces_of([facts(node).value for node in self.outputs])]
        return bool(inputs & set(outputs)) or len(set(outputs)) < len(outputs)

    @property
    def key(self) -> tuple:
        """Equal for stretches that torch traces alike: a model has many equal layers."""
        number = {node: f"%{i}" for i, node in enumerate((*self.inputs, *self.nodes))}

        def shown(value: Any) -> str:
            return repr(fx.map_arg(value, lambda node: _Named(number[node] if node in number else _text(facts(node).value))))

        calls = tuple((node.op, node.target, shown((node.args, node.kwargs)), facts(node).autocast) for node in self.nodes)
        places = tuple(number[node] + str(requires_grad(node)) for node in self.outputs)
        return (calls, places, *(_described(part) for node in self.inputs for part in spread([facts(node).value])))

    @property
    def pieces(self) -> list[torch.Tensor]:
        """The plain tensors of the inputs."""
        return pieces_of([facts(node).value for node in self.inputs])

    def assemble(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs, of new plain tensors."""
        remaining = iter(pieces)
        values = [facts(node).value for node in self.inputs]
        return [take_apart(v)[1].wrap(remaining) if is_wrapper(v) else next(remaining) for v in values]

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The outputs for these inputs, in the autocast regions of the nodes.

        Raises:
            UnsupportedOperatorError: A wrapper among the inputs holds other tensors afterwards.
        """
        held = [take_apart(value)[0] if is_wrapper(value) else [] for value in values]
        env = dict(zip(self.inputs, values, strict=True))
        with _autocast(self.nodes[0]):
            for node in self.nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n] if n in env else facts(n).value)
                env[node] = _call(node, args, kwargs)
        for value, before in zip(values, held, strict=True):
            if before and any(now is not then for now, then in zip(take_apart(value)[0], before, strict=True)):
                raise UnsupportedOperatorError(f"a {type(value).__name__} is given other inner tensors")
        return [env[node] for node in self.outputs]


@dataclasses.dataclass(frozen=True)
class _Named:
    """What a node is called in a text."""

    name: str

    def __repr__(self) -> str:
        return self.name


def _text(value: Any) -> str:
    """A plain value, or which body it is."""
    return f"{type(value)} {id(value)}" if isinstance(value, fx.GraphModule) else repr(value)


def has_body(node: fx.Node) -> bool:
    """Whether a node runs a graph of its own."""
    return isinstance(node.target, (torch._ops.HigherOrderOperator, Region))


def is_autograd_function(node: fx.Node) -> bool:
    """Whether a node is a user's `autograd.Function`, which torch runs, and differentiates, as eager does."""
    return node.target is torch.ops.higher_order.autograd_function_apply


def _described(part: Any) -> Any:
    """What a trace depends on of an input: a structure, or a plain tensor."""
    if isinstance(part, Structure):
        return part
    return (part.shape, part.stride(), part.dtype, part.device, part.requires_grad)


def _call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def requires_grad(node: fx.Node) -> bool:
    """Whether a node's value required grad when it was made."""
    geometry = facts(node).geometry
    return geometry is not None and geometry.requires_grad


@contextlib.contextmanager
def _autocast(node: fx.Node) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, dtype in facts(node).autocast:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        yield


def _fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the present fake mode, with memory and history of their own."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def plain(stretch: Stretch) -> fx.GraphModule:
    """The stretch as an ATen graph `pieces of the inputs -> pieces of the outputs`, with the writes it does."""

    def call(*pieces: torch.Tensor) -> list[torch.Tensor]:
        return pieces_of(stretch.run(stretch.assemble(pieces)))

    with FakeTensorMode(), torch.no_grad():
        return make_fx(call)(*_fresh(stretch.pieces))


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of an input that is a wrapper.

    Attributes:
        input: Which input.
        structure: The gradient's, None if it is a plain tensor.
        likes: Shape and dtype of its pieces.
    """

    input: int
    structure: Structure | None
    likes: tuple[tuple[torch.Size, torch.dtype], ...]


@dataclasses.dataclass(frozen=True)
class Differentiated:
    """A stretch and the gradient that torch gives it.

    Attributes:
        split: Forward and backward. Their operands are the pieces of the inputs, then one for each piece of `gradients`.
        gradients: Of the inputs that are wrappers; those of plain inputs belong to the pieces.
    """

    split: Split
    gradients: tuple[Gradient, ...]


def differentiated(stretch: Stretch) -> Differentiated:
    """The stretch with its backward: torch differentiates it on the wrappers themselves, as eager does.

    Raises:
        UnsupportedOperatorError: It writes an input, or a gradient cannot be one of plain floating-point tensors.
    """
    found: list[Any] = []
    joint = _Joint(stretch, found)
    with FakeTensorMode(), torch.no_grad():
        pieces, cotangents = _fresh(stretch.pieces), _fresh([facts(n).value for n in stretch.outputs if requires_grad(n)])
        gm = make_fx(joint)(*pieces, *cotangents)
        if any(piece._version for piece in pieces):
            raise UnsupportedOperatorError("a node that autograd records writes to an input next to a tensor subclass")
        if any(_is_mutable(node) for node in gm.graph.nodes):
            gm = make_fx(torch.func.functionalize(gm, remove="mutations_and_views"))(*pieces, *cotangents)
    owners, gradients = found
    carried = [requires_grad(node) for node in stretch.outputs for _ in pieces_of([facts(node).value])]
    return Differentiated(split(gm, len(pieces), carried, owners), gradients)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Joint:
    """`(*pieces of the inputs, *cotangents) -> (*pieces of the outputs, *gradients)`; notes whose gradients they are."""

    def __init__(self, stretch: Stretch, found: list[Any]) -> None:
        self.stretch = stretch
        self.found = found

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        stretch, count = self.stretch, len(self.stretch.pieces)
        with torch.enable_grad():
            inputs = [self.leaf(*pair) for pair in zip(stretch.inputs, stretch.assemble(values[:count]), strict=True)]
            outputs = stretch.run(inputs)
            wanted = [i for i, value in enumerate(inputs) if value.requires_grad]
            heads = [o for o, node in zip(outputs, stretch.outputs, strict=True) if requires_grad(node)]
            grads = torch.autograd.grad(heads, [inputs[i] for i in wanted], values[count:], allow_unused=True)
        return [*pieces_of(outputs), *self.pieces(dict(zip(wanted, grads, strict=True)))]

    def leaf(self, node: fx.Node, value: torch.Tensor) -> torch.Tensor:
        """An input that a gradient is wanted of; wrappers are leaves already."""
        return value.detach().requires_grad_() if requires_grad(node) and not is_wrapper(value) else value

    def pieces(self, grads: dict[int, torch.Tensor | None]) -> list[torch.Tensor]:
        """The gradients' pieces; noted are the operands that they belong to."""
        owners: list[int] = []
        results: list[torch.Tensor] = []
        gradients: list[Gradient] = []
        place, extra = 0, len(self.stretch.pieces)
        for i, node in enumerate(self.stretch.inputs):
            grad, value = grads.get(i), facts(node).value
            if grad is not None:
                parts, structure = take_apart(grad) if is_wrapper(grad) else ([grad], None)
                self.check(node, parts, structure)
                if is_wrapper(value):
                    gradients.append(Gradient(i, structure, tuple((part.shape, part.dtype) for part in parts)))
                    owners += range(extra, extra := extra + len(parts))
                else:
                    owners.append(place)
                results += parts
            place += len(pieces_of([value]))
        self.found[:] = [tuple(owners), tuple(gradients)]
        return results

    def check(self, node: fx.Node, parts: Sequence[torch.Tensor], structure: Structure | None) -> None:
        if not all(part.is_floating_point() or part.is_complex() for part in parts):
            raise UnsupportedOperatorError(f"the gradient of {node.name} holds integers")
        if structure is not None and not is_wrapper(facts(node).value):
            raise UnsupportedOperatorError(f"the gradient of {node.name}, a plain tensor, is a {structure.cls.__name__}")
