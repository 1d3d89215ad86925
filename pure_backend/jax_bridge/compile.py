"""A functional graph -> a `Program`, found in the cache or traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from pure_backend import _compat, counters
from pure_backend.ir.canonical import graph_key
from pure_backend.ir.facts import facts
from pure_backend.ir.modes import saved_tensors_unseen
from pure_backend.jax_bridge.avals import is_differentiable, to_aval
from pure_backend.jax_bridge.cache import ProgramCache
from pure_backend.jax_bridge.executables import Executables
from pure_backend.jax_bridge.key_text import key_text
from pure_backend.jax_bridge.program import Program
from pure_backend.jax_bridge.runtimes import Place, made_runtimes, place_of, runtime_for
from pure_backend.jax_bridge.trace import trace

programs = ProgramCache()
"""The programs of this process."""


class Key(NamedTuple):
    """All that a program depends on; see `compile_graph` for what is not named by itself."""

    graph: tuple[str, tuple[Any, ...]]
    differentiable: tuple[bool, ...]
    reach: tuple[frozenset[int], ...]
    requires_grad: tuple[int, ...]
    written: tuple[int, ...]
    device: str
    remat: Any
    settings: tuple[Any, ...]


def compile_graph(
    gm: fx.GraphModule,
    differentiable: Sequence[bool],
    reach: Sequence[frozenset[int]],
    written: Sequence[int],
    device: Place,
    remat: Any,
) -> Program:
    """The program of a functional graph.

    Args:
        gm: Its placeholders become the program's inputs.
        differentiable: For each output, whether it carries a gradient.
        reach: For each output, the placeholders whose gradient it contributes to.
        written: The placeholders that the caller writes after each call.
        device: Where it will run.
        remat: See `Options.remat`.
    """
    _compat.torchax()
    tensors = [facts(n).value for n in gm.graph.find_nodes(op="placeholder", sort=True)]
    wanted = tuple(i for i, t in enumerate(tensors) if t.requires_grad and is_differentiable(t.dtype))
    inputs = wanted if any(differentiable) else ()
    carries = tuple(differentiable) if inputs else (False,) * len(differentiable)
    key = Key(
        graph_key(gm), tuple(differentiable), tuple(reach), inputs, tuple(written), str(place_of(device)), remat, settings()
    )

    def traced() -> tuple[Any, bool]:
        with counters.timed("trace", f"a graph of {len(gm.graph.nodes)} nodes"), _compat.x64(), saved_tensors_unseen():
            counters.count("traces")
            return trace(gm, [to_aval(t) for t in tensors])

    def make() -> Program:
        runtime = runtime_for(device)
        executables = Executables(runtime, key_text(key, gm, runtime))
        stored = executables.forward
        jaxpr, uses_key = traced() if stored is None else (lambda: traced()[0], stored.uses_key)
        return Program(jaxpr, inputs, carries, tuple(reach), uses_key, runtime, remat, frozenset(written), executables)

    return programs.get(key, make)


def settings() -> tuple[Any, ...]:
    """Process-wide settings that change what a program computes."""
    return (
        _compat.float32_matmul_precision(),
        torch.get_default_dtype(),
        _compat.jax_settings(),
    )


def clear() -> None:
    """Forget every program and every view of a tensor."""
    programs.clear()
    for runtime in made_runtimes():
        runtime.clear()
