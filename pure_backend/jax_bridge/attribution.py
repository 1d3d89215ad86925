"""Which nodes of a graph cannot be traced, differentiated, lowered or compiled: found by taking each one by itself.

JAX differentiates and lowers a program as a whole, so an error there names no node. This is asked only after the whole failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pure_backend.errors import ImpureGraphError
from pure_backend.ir.facts import facts
from pure_backend.ir.failures import failure, graph_failure
from pure_backend.ir.impurity import Impurity
from pure_backend.jax_bridge.avals import is_differentiable, to_aval
from pure_backend.jax_bridge.program import Program
from pure_backend.jax_bridge.rng import KEY, KeyStream
from pure_backend.jax_bridge.runtimes import Place, runtime_for
from pure_backend.jax_bridge.trace import Walker, tracing


@contextlib.contextmanager
def attributed(gm: fx.GraphModule, device: Place, remat: Any) -> Iterator[None]:
    """Turn an error in this scope into impurities of the nodes that fail by themselves, or of the whole graph.

    Args:
        gm: The functional graph that is compiled inside.
        device: Where it will run.
        remat: See `Options.remat`.

    Raises:
        ImpureGraphError: With these nodes.
    """
    try:
        yield
    except Exception as error:
        whole = graph_failure(error)
        nodes = [] if whole is error else failing_nodes(gm, device, remat)
        raise (ImpureGraphError(nodes) if nodes else whole) from error


def failing_nodes(gm: fx.GraphModule, device: Place, remat: Any) -> list[Impurity]:
    """The impurity of each node that does not become an executable by itself."""
    seen: set[Any] = set()
    found = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        try:
            program = _alone(gm, node, device, remat)
            content = (str(program.jaxpr), program.inputs)
            if content not in seen:
                program.prepare()
                seen.add(content)
        except Exception as error:
            found.append(failure(node, error))
    return found


def _alone(gm: fx.GraphModule, node: fx.Node, device: Place, remat: Any) -> Program:
    """The program of one node, differentiated by all of its arguments that require a gradient."""
    fixed = {arg: Walker(KeyStream(None)).constant(gm, arg) for arg in node.all_input_nodes if arg.op == "get_attr"}
    given = [arg for arg in node.all_input_nodes if arg not in fixed]

    def function(arrays, key):
        values = pytree.tree_unflatten(arrays, spec)
        return pytree.tree_leaves(Walker(KeyStream(key)).node(node, fixed | dict(zip(given, values, strict=True))))

    leaves, spec = pytree.tree_flatten([facts(arg).value for arg in given])  # torch's own result types are no trees of JAX
    with tracing():
        jaxpr = jax.make_jaxpr(function)(list(map(_aval, leaves)), KEY)
    wanted = tuple(i for i, leaf in enumerate(leaves) if _requires_grad(leaf) and facts(node).grad)
    carries = tuple(bool(wanted) and jnp.issubdtype(aval.dtype, jnp.inexact) for aval in jaxpr.out_avals)
    inputs = wanted if any(carries) else ()
    reach = (frozenset(inputs),) * len(carries)
    return Program(jaxpr, inputs, carries, reach, True, runtime_for(device), remat)


def _aval(leaf: Any) -> jax.ShapeDtypeStruct:
    """The aval of a tensor, or of a Python number that is known at runtime only."""
    return to_aval(leaf) if isinstance(leaf, torch.Tensor) else jax.ShapeDtypeStruct((), jnp.float64)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_differentiable(leaf.dtype)
