"""Only tensors are inputs of a functional graph: what else it was given is a constant in its nodes already."""

from __future__ import annotations

import dataclasses

import torch

from pure_backend.fx_passes.functional import Functional, Inputs
from pure_backend.ir.facts import facts


def tensors_only(functional: Functional) -> Functional:
    """The graph without placeholders of other types than tensor; it is edited.

    Before: `f(x, 3)` with `%y = mul(%x, 3)`; after: `f(x)` with the same node.
    """
    left = []
    for node, source in zip(
        functional.gm.graph.find_nodes(op="placeholder", sort=True), functional.inputs.sources, strict=True
    ):
        if isinstance(facts(node).value, torch.Tensor):
            left.append(source)
        else:
            functional.gm.graph.erase_node(node)
    return dataclasses.replace(functional, inputs=Inputs(tuple(left)))
