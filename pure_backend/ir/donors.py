"""Which inputs of a graph are donated: their memory may be reused by its program, so they are invalid after the call.

A user donates with `jax_op(..., donate_argnames=...)` or, as for torch_xla's `openxla` backend, with
`torch.ops.xla.dynamo_set_buffer_donor_(x, True)` on an input `x`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import fx

from pure_backend.errors import DonationError
from pure_backend.ir.describe import qualified_name
from pure_backend.ir.facts import facts, learn

donated_arguments: dict[str, tuple[int, ...]] = {}
"""Positions of the donated arguments of operators, by the operators' names."""

_MARKER = "xla::dynamo_set_buffer_donor_"


def take_markers(gm: fx.GraphModule) -> None:
    """Remove the marking nodes; the inputs that they name note it in their facts."""
    for node in list(gm.graph.nodes):
        if qualified_name(node.target) != _MARKER:
            continue
        marked, donated = node.args
        if marked.op == "placeholder":
            learn(marked, donated=donated)
        node.replace_all_uses_with(marked)
        gm.graph.erase_node(node)


def donors(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The placeholders of a graph that are donated."""
    found = {node for node in gm.graph.find_nodes(op="placeholder") if facts(node).donated}
    if donated_arguments:
        for node in gm.graph.nodes:
            positions = donated_arguments.get(qualified_name(node.target))
            args = [node.args[i] for i in positions or () if i < len(node.args)]
            found |= {arg for arg in args if isinstance(arg, fx.Node) and arg.op == "placeholder"}
    return frozenset(found)


_given_away: dict[int, tuple[weakref.ref, int]] = {}


def give_away(tensor: torch.Tensor) -> None:
    """Remember that a tensor's memory was given away; a new value that is written to it later makes it valid again."""
    key = id(tensor)
    _given_away[key] = (weakref.ref(tensor, lambda _: _given_away.pop(key, None)), tensor._version)


def check_valid(tensors: Sequence[torch.Tensor], user: str, names: Callable[[], Sequence[str]]) -> None:
    """Whether none of these was given away.

    Args:
        tensors: The inputs of a call.
        user: What is called.
        names: Gives the user's name of each input, for the message.

    Raises:
        DonationError: One was; its memory is no more, or another tensor's.
    """
    if not _given_away:
        return
    for i, tensor in enumerate(tensors):
        known = _given_away.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            raise DonationError(
                f"{user}: argument {names()[i]!r}, a tensor of shape {tuple(tensor.shape)}, was donated to an earlier call "
                "and is invalid since; use that call's result, or donate a clone"
            )
