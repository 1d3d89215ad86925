"""Compile for a TPU that is not there, and look at the result: kernels, aliases, copies, memory, cost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend import core

from pure_backend import _compat
from pure_backend.custom_ops.jax_op import CustomOpDef, InPlaceOp
from pure_backend.errors import DeviceError
from pure_backend.inspect import hlo
from pure_backend.inspect.collectives import Collective, collectives, gathered_whole
from pure_backend.inspect.layout import Layout, layout
from pure_backend.inspect.step_program import capture_step
from pure_backend.inspect.topology import tpu_device
from pure_backend.inspect.torch_program import NamedProgram, capture, output_names
from pure_backend.ir.positions import with_values
from pure_backend.jax_bridge.avals import to_aval
from pure_backend.jax_bridge.frames import in_bare_thread
from pure_backend.jax_bridge.jaxprs import dce_jaxpr, with_outputs
from pure_backend.jax_bridge.platform import for_platform
from pure_backend.jax_bridge.trace import tracing
from pure_backend.transforms.train_step import TrainStep

_TOPOLOGY = "v5e:2x2"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program, with the padding of tiles.

    Attributes:
        arguments: All arguments.
        outputs: All results.
        aliased: The part of the results that lies in arguments.
        temporaries: The largest sum of intermediate values at one time.
        code: The program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int


@dataclasses.dataclass(frozen=True, repr=False)
class TPUProgram:
    """A program compiled for one TPU core, or for each core of a mesh.

    Attributes:
        topology: What it was compiled for, `"v5e:2x2"`.
        device: The kind of device, `"TPU v5 lite"`.
        inputs: The names of its arguments.
        outputs: The names of its results.
        stablehlo: The program as JAX lowered it.
        hlo: The program as XLA optimized it.
        memory: Its bytes.
        cost: XLA's estimate: `flops`, `bytes_accessed`, ... (a kernel counts with its `cost_estimate`, or not at all).
        aliases: Results that lie in the memory of arguments.
        kernels: Pallas kernels.
        copies: Copies that it makes.
        mesh: The axes of the mesh that it is for and their sizes, in the order of its partitions; empty for one core. Memory
            and cost are those of one device.
        shardings: By argument the axes that each of its dimensions is split over, as `("dp", None)`; `()` on every device.
        collectives: What devices send each other.
        warnings: What is gathered whole although it is no argument.
    """

    topology: str
    device: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stablehlo: str
    hlo: str
    memory: Memory
    cost: Mapping[str, float]
    aliases: tuple[hlo.Alias, ...]
    kernels: tuple[hlo.Kernel, ...]
    copies: tuple[hlo.Copy, ...]
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shardings: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    warnings: tuple[str, ...] = ()

    def copies_of(self, name: str) -> tuple[hlo.Copy, ...]:
        """The copies of one argument.

        Raises:
            ValueError: There is no such argument.
        """
        if name not in self.inputs:
            raise ValueError(f"the program has no argument {name!r}; it has {list(self.inputs)}")
        return tuple(c for c in self.copies if c.input is not None and self.inputs[c.input] == name)

    def __repr__(self) -> str:
        aliased = ", ".join(f"{self.outputs[a.output]} in {self.inputs[a.input]}" for a in self.aliases) or "none"
        copied = sum(c.bytes for c in self.copies)
        return (
            f"<TPUProgram for {self.topology} ({self.device}): {len(self.kernels)} kernels; aliases: {aliased}; "
            f"{len(self.copies)} copies of {copied:,} bytes; temporaries {self.memory.temporaries:,} bytes; "
            f"{self.cost.get('flops', 0.0):,.0f} flops>"
        )


def compile_for_tpu(
    fn: Callable[..., Any],
    *args: Any,
    topology: str = _TOPOLOGY,
    donate: Sequence[int] = (),
    backward: bool = False,
    mesh: Mapping[str, int] | None = None,
    rules: Mapping[str, Any] | None = None,
    batch: Any = None,
    **kwargs: Any,
) -> TPUProgram:
    """Compile a function for a TPU with libtpu's ahead-of-time compiler. No TPU is needed and nothing is run.

    Args:
        fn: A JAX function of arrays; an operator that `jax_op` made; a torch function or module, which is captured whole and
            compiled as `torch.compile(fn, backend="assume_pure", fullgraph=True)` would; or a `TrainStep`, whose arguments are
            a batch, and whose parameters, buffers and states keep their memory.
        *args: Its arguments; arrays may be `jax.ShapeDtypeStruct`s, but for torch functions.
        topology: A generation and the extent of a slice; without a mesh the program is for one core of it.
        donate: Positions of the arguments whose memory may be reused. What an operator donates or writes and what a torch
            function writes is donated anyway.
        backward: Compile the gradient instead: for torch functions the program that autograd runs, `(residuals, cotangents) ->
            gradients`; for the others `(arrays, cotangents) -> gradients` by all floating-point arrays.
        mesh: Axes and their sizes, as `{"dp": 4, "tp": 4}`: the program is for all devices of the topology, global in its
            shapes and partitioned by XLA. For a torch module or a `TrainStep`.
        rules: With a mesh, how parameters are split, by pattern of their names: `{"*.up.weight": ("tp", None)}` or DTensor
            placements, one for each axis. States are split as their parameters. What matches no rule is on every device.
        batch: With a mesh, how the other tensors are split; by default their first dimension over the first axis.
        **kwargs: Its keyword arguments.

    Returns:
        The compiled program.

    Raises:
        DeviceError: libtpu is not installed, or the program does not fit a device's memory.
        ValueError: libtpu knows no such topology, `donate` names no array, there is nothing to differentiate, or mesh and rules
            do not fit topology and parameters.
        ImpureGraphError: The torch function cannot be one program.

    Example:
        >>> program = compile_for_tpu(lambda x: x + 1, jax.ShapeDtypeStruct((8, 128), "float32"), donate=[0])
        >>> program.aliases
        (Alias(output=0, input=0),)
    """
    device = tpu_device(topology)
    call = _call(fn, args, kwargs, donate)
    captured = call.backward() if backward else call.forward()
    shardings = _shardings(captured, None if mesh is None else layout(topology, mesh, rules, batch), device)
    lowered, inputs, outputs = _lowered(captured, shardings)
    compiled = _compiled(lowered, topology)
    text, stats = compiled.as_text(), compiled.memory_analysis()
    memory = Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )
    return TPUProgram(
        topology=topology,
        device=device.device_kind,
        inputs=inputs,
        outputs=outputs,
        stablehlo=lowered.as_text(),
        hlo=text,
        memory=memory,
        cost=hlo.cost(compiled.cost_analysis()),
        aliases=hlo.aliases(text),
        kernels=hlo.kernels(text),
        copies=hlo.copies(text),
        **({} if mesh is None else _partitioned(text, mesh, inputs, captured, shardings)),
    )


def _compiled(lowered: Any, topology: str) -> Any:
    try:
        return in_bare_thread(lowered.compile)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DeviceError(f"compile_for_tpu: the program does not fit a device of {topology}: {error}") from error


def _partitioned(
    text: str, mesh: Mapping[str, int], inputs: Sequence[str], captured: NamedProgram, shardings: Sequence[Any]
) -> dict:
    """What there is to tell of a program for several devices."""
    found = collectives(text, mesh, inputs)
    split = {name: tuple(sharding.spec) for name, sharding in zip(captured.inputs, shardings, strict=True) if name in inputs}
    return {"mesh": dict(mesh), "shardings": split, "collectives": found, "warnings": gathered_whole(found)}


def _shardings(program: NamedProgram, layout: Layout | None, device: Any) -> list[Any]:
    """Where each input of a program lies."""
    if layout is None:
        return [jax.sharding.SingleDeviceSharding(device)] * len(program.inputs)
    if not program.owners:
        raise ValueError("compile_for_tpu: a mesh is for torch modules, torch functions and training steps, forward")
    shapes = [v.aval.shape for v in program.jaxpr.jaxpr.invars]
    return list(layout.shardings(list(zip(program.owners, shapes, strict=True))))


def _lowered(program: NamedProgram, shardings: Sequence[Any]) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """JAX's lowered stage for inputs that lie so, with the names of its arguments and results.

    Results that are written into arguments come first, in the order of those, and lie where those do: `jax.jit` lets donated
    arguments meet results of their type in order.
    """
    written = [program.written[i] for i in sorted(program.written)]
    order = [*written, *(i for i in range(len(program.outputs)) if i not in written)]
    jaxpr = program.jaxpr.jaxpr
    jaxpr = with_outputs(jaxpr, [jaxpr.outvars[i] for i in order])
    jaxpr, used = dce_jaxpr(jaxpr)
    closed = for_platform(core.ClosedJaxpr(jaxpr, program.jaxpr.consts), "tpu")
    kept = [i for i, reads in enumerate(used) if reads]
    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=shardings[i]) for v, i in zip(jaxpr.invars, kept, strict=True)
    ]
    donated = tuple(kept.index(i) for i in sorted({*program.donated, *program.written}) if i in kept)
    results = [shardings[i] for i in sorted(program.written)] + [None] * (len(order) - len(written))
    with tracing():
        jitted = jax.jit(core.jaxpr_as_fun(closed), donate_argnums=donated, keep_unused=True, out_shardings=results)
        lowered = jitted.trace(*avals).lower(lowering_platforms=("tpu",))
    return lowered, tuple(program.inputs[i] for i in kept), tuple(program.outputs[i] for i in order)


# --------------------------------------------------------------------------------------------- what there is to compile


@dataclasses.dataclass(frozen=True)
class _Call:
    """The two programs of a call."""

    forward: Callable[[], NamedProgram]
    backward: Callable[[], NamedProgram]


def _call(fn: Any, args: tuple, kwargs: dict[str, Any], donate: Sequence[int]) -> _Call:
    if isinstance(fn, (CustomOpDef, InPlaceOp)):
        return _operator_call(fn, args, kwargs, donate)
    if isinstance(fn, TrainStep):
        return _step_call(fn, args, kwargs, donate)
    leaves = jax.tree.leaves((args, kwargs))
    if isinstance(fn, torch.nn.Module) or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        side = functools.partial(capture, fn, args, kwargs, tuple(donate))
        return _Call(lambda: side(backward=False), lambda: side(backward=True))
    return _function_call(fn, args, kwargs, donate)


def _step_call(step: TrainStep, args: tuple, kwargs: dict[str, Any], donate: Sequence[int]) -> _Call:
    if donate:
        raise ValueError("compile_for_tpu: a training step donates what it updates, and a batch is the caller's")

    def backward() -> NamedProgram:
        raise ValueError("compile_for_tpu: a training step has no gradient")

    return _Call(lambda: capture_step(step, args, kwargs), backward)


def _operator_call(op: CustomOpDef | InPlaceOp, args: tuple, kwargs: dict[str, Any], donate: Sequence[int]) -> _Call:
    op.parameters.check(args, kwargs)
    arrays, structure = op.parameters.flatten(args, kwargs)
    names = op.parameters.names(structure)
    mutated = op.mutated if isinstance(op, InPlaceOp) else ()
    inner = op.functional if isinstance(op, InPlaceOp) else op
    positions = [p.name for p in op.parameters.each]
    for position in donate:
        if position >= len(positions) or positions[position] not in names:
            raise ValueError(f"compile_for_tpu: donate has {position}, which is no array of {op.name}{tuple(positions)}")
    given_away = {*inner.donated, *(positions[i] for i in donate)}
    donated = tuple(i for i, name in enumerate(names) if name in given_away)
    written = {names.index(name): i for i, name in enumerate(mutated)}
    return _flat_call(inner._function(structure), arrays, _numbered(names), donated, written, tracing)


def _function_call(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], donate: Sequence[int]) -> _Call:
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    for position in donate:
        if position >= len(args):
            raise ValueError(f"compile_for_tpu: donate has {position}, there are {len(args)} positional arguments")
    array = [hasattr(leaf, "dtype") and hasattr(leaf, "shape") for _, leaf in paths]
    donated = [path[0].idx == 0 and path[1].idx in donate for (path, _), is_array in zip(paths, array, strict=True) if is_array]

    def flat(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        leaves = [next(remaining) if is_array else leaf for (_, leaf), is_array in zip(paths, array, strict=True)]
        filled, keywords = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(fn(*filled, **keywords))

    arrays = [leaf for (_, leaf), is_array in zip(paths, array, strict=True) if is_array]
    names = [f"args{jax.tree_util.keystr(path[1:])}" for (path, _), is_array in zip(paths, array, strict=True) if is_array]
    flat_donated = tuple(i for i, gives in enumerate(donated) if gives)
    return _flat_call(flat, arrays, names, flat_donated, {}, contextlib.nullcontext)


def _flat_call(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    names: Sequence[str],
    donated: tuple[int, ...],
    written: dict[int, int],
    scope: Callable[[], contextlib.AbstractContextManager[None]],
) -> _Call:
    """A call of a function of flat arrays, traced in a scope."""
    with _compat.x64():
        avals = [to_aval(a) if isinstance(a, torch.Tensor) else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]

    def forward() -> NamedProgram:
        with scope():
            jaxpr = jax.make_jaxpr(lambda *values: tuple(function(*values)))(*avals)
        return NamedProgram(jaxpr, tuple(names), output_names(len(jaxpr.jaxpr.outvars), written, names), donated, written)

    def backward() -> NamedProgram:
        wanted = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
        with scope():
            results = jax.eval_shape(lambda *values: tuple(function(*values)), *avals)
            carrying = [i for i, result in enumerate(results) if jnp.issubdtype(result.dtype, jnp.inexact)]
            if not wanted or not carrying:
                raise ValueError("compile_for_tpu: no result depends on a floating-point array, so there is no gradient")
            jaxpr = jax.make_jaxpr(_gradient(function, wanted, carrying))(avals, [results[i] for i in carrying])
        inputs = (*names, *(f"cotangent {i}" for i in carrying))
        return NamedProgram(jaxpr, inputs, tuple(f"gradient of {names[i]}" for i in wanted), (), {})

    return _Call(forward, backward)


def _gradient(function: Callable[..., Any], wanted: Sequence[int], carrying: Sequence[int]) -> Callable[..., Any]:
    """The gradient `(arrays, cotangents of the carrying results) -> cotangents of the wanted arrays`."""

    def gradient(arrays: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def differentiated(*chosen: Any) -> list[Any]:
            results = list(function(*with_values(arrays, wanted, chosen)))
            return [results[i] for i in carrying]

        _, vjp = jax.vjp(differentiated, *(arrays[i] for i in wanted))
        return vjp(list(cotangents))

    return gradient


def _numbered(names: Sequence[str]) -> list[str]:
    """Names, numbered where a parameter takes a list of arrays."""
    return [f"{name}[{names[:i].count(name)}]" if names.count(name) > 1 else name for i, name in enumerate(names)]
