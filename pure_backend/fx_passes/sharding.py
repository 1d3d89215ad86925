"""Sharding annotations that are made in place: what reads the value afterwards reads the annotated one."""

from __future__ import annotations

from torch import fx

from pure_backend.ir.describe import qualified_name

_ANNOTATION = "xla::dynamo_mark_sharding"


def thread_annotations(gm: fx.GraphModule) -> None:
    """Let later nodes read the result of an annotation, which else has no user and is dropped.

    Before: `%m = dynamo_mark_sharding(%y, ...); %s = sin(%y)`; after: `%s = sin(%m)`.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        if qualified_name(node.target) == _ANNOTATION and isinstance(value := node.args[0], fx.Node):
            value.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: place[user] > place[node])
