"""Sharding annotations that are made in place: what reads the value afterwards reads the annotated one."""

from __future__ import annotations

import torch
from torch import fx

_ANNOTATION = "xla::dynamo_mark_sharding"


def thread_annotations(gm: fx.GraphModule) -> None:
    """Let later nodes read the result of an annotation, which else has no user and is dropped.

    Before: `%m = dynamo_mark_sharding(%y, ...); %s = sin(%y)`; after: `%s = sin(%m)`.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        if _is_annotation(node) and isinstance(value := node.args[0], fx.Node):
            value.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: place[user] > place[node])


def _is_annotation(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return node.target._qualified_op_name == _ANNOTATION
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == _ANNOTATION
