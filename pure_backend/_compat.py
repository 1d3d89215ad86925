"""The one place that knows versions, and the one importer of torchax.

torchax is used as a table of JAX functions for ATen operators (`aten_table`); its environment and tensor class are never
entered. Importing it whole changes global state of torch and JAX and fails on newer torch, so the import is fenced here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import threading
import types
import unittest.mock
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pure_backend._deferred import defer
from pure_backend.errors import EnvironmentMismatchError

SCAN_TAKES_INTEGERS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
"""Whether torch's `scan` differentiates with integers among carries and results; 2.13 fails ("outs_to_grad length")."""


@functools.cache
def float8_saturates() -> bool:
    """Whether torch casts what is too large for `float8_e4m3fn` to its largest number (seen in 2.13) or to NaN (in 2.9)."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return bool(torch.tensor(1e4).to(torch.float8_e4m3fn).float().isfinite())


def jax():
    """The `jax` module, imported at first compile and not on import of the package."""
    import jax as module

    return module


def keeps_products_by_address(jaxlib: str) -> bool:
    """Whether XLA:CPU of a jaxlib version may multiply by the weights that lay at an address before.

    Up to 0.8.1 XLA's XNNPACK thunks pack the right side of a product once and find it again by its address, so a parameter that
    changes in place keeps its first values. Which products go to XNNPACK is decided by processor and shape, so a trial product
    proves nothing: on some processors a small one is right and a large one is not. The version tells, and costs nothing.
    """
    return tuple(map(int, re.findall(r"\d+", jaxlib)[:3])) < (0, 8, 2)


RIGHT_JAXLIB = "pip install 'jax>=0.8.2,<0.11' 'jaxlib>=0.8.2,<0.11'"
"""The command that replaces a jaxlib that `keeps_products_by_address`."""


def check_cpu_client() -> None:
    """Refuse a jaxlib whose results on CPU depend on more than the values of the inputs.

    XLA's option `xla_cpu_use_xnnpack=False` mends its products, but not its runs on several devices, and our tests know no such
    version: so it is refused, not mended.

    Raises:
        EnvironmentMismatchError: The jaxlib that is imported `keeps_products_by_address`.
    """
    import jaxlib

    if keeps_products_by_address(jaxlib.__version__):
        raise EnvironmentMismatchError(
            f"jaxlib {jaxlib.__version__} (jax {jax().__version__}) keeps weights of matrix products by address on CPU, so "
            f"results are wrong after parameters change in place. Run: {RIGHT_JAXLIB}"
        )


def x64() -> contextlib.AbstractContextManager[None]:
    """64-bit types for this thread and scope only.

    Without it an int64 input lowers to an s32 parameter and XLA rejects the call.
    """
    return jax().enable_x64(True)


_torchax_lock = threading.RLock()


@contextlib.contextmanager
def _named_tensor_overloads_exist() -> Iterator[None]:
    """Answer, in this thread, for the named-tensor overloads that torchax 0.0.13 names and torch 2.13 no longer has."""
    packet, thread = torch._ops.OpOverloadPacket, threading.get_ident()

    def lookup(self, name):
        try:
            return original(self, name)
        except AttributeError:
            if threading.get_ident() == thread and ("imname" in name or "names" in name):
                return object()
            raise

    with _torchax_lock:
        original = packet.__getattr__
        packet.__getattr__ = lookup
        try:
            yield
        finally:
            packet.__getattr__ = original


def torchax_version() -> str | None:
    """The version that torchax's own files state; they are not run."""
    spec = importlib.util.find_spec("torchax")
    if spec is None or spec.origin is None:
        return None
    match = re.search(r"""^__version__ = ["'](.+)["']""", Path(spec.origin).read_text(), re.MULTILINE)
    return match and match[1]


@functools.cache
def torchax() -> Any:
    """torchax's operators (`torchax.ops.ops_registry`), without what torchax does to torch and JAX.

    Its root module renames PrivateUse1 to "jax", registers a device, and sets flags of torch, JAX and the environment; its
    decompositions take the place of torch's own. Neither is needed for the table of operators, so both wait for somebody who
    asks for something of theirs: a user's own `import torchax; torchax.default_env()` runs them.

    Raises:
        EnvironmentMismatchError: torchax is missing or fails, or its files are not those of the installed distribution (the
            torch_xla wheel bundles an old copy).
    """
    try:
        expected, found = importlib.metadata.version("torchax"), torchax_version()
    except ImportError as error:
        raise EnvironmentMismatchError(f"torchax is not installed: {_INSTALL_TORCHAX}") from error
    if found != expected:
        raise EnvironmentMismatchError(
            f"torchax's files are version {found} but its distribution is {expected}: torch_xla's wheel "
            f"overwrote them. Run: pip install --force-reinstall --no-deps torchax=={expected}"
        )
    try:
        with _named_tensor_overloads_exist():
            defer("torchax", _named_tensor_overloads_exist)
            importlib.import_module("torchax.ops.jaten")
            importlib.import_module("torchax.ops.jtorch")
            defer("torchax.decompositions", _named_tensor_overloads_exist)
            # A device module that calls itself available lets Dynamo on torch 2.13 ask torch for device interfaces it does not
            # have ("PyTorch is not linked with support for jax devices") in every compile, once a user runs torchax.
            importlib.import_module("torchax.device_module").is_available = lambda: False
            return importlib.import_module("torchax.ops.ops_registry")
    except Exception as error:  # a torchax that does not fit may raise anything
        raise EnvironmentMismatchError(
            f"torchax cannot be imported ({type(error).__name__}: {error}): {_INSTALL_TORCHAX}"
        ) from error


_INSTALL_TORCHAX = "pip install --force-reinstall --no-deps torchax==0.0.13, after torch_xla"


@functools.cache
def aten_table() -> dict[Any, Callable[..., Any]]:
    """torchax's JAX functions, by `OpOverload` or `OpOverloadPacket`; those that need its environment are left out."""
    table = torchax().all_aten_ops
    return {key: op.func for key, op in table.items() if op.is_jax_function and not op.needs_env}


@functools.cache
def torch_xla():
    """The `torch_xla` module, or None where it is not installed."""
    try:
        import torch_xla as module
    except ImportError:
        return None
    return module


def tensor_check(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """A check, in C++, that tensors have the types, dtypes, devices, sizes, strides and gradient flags of these.

    It is the one of Dynamo's guards. It refuses a tensor that is given twice, and one under another dispatch mode.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes, strides = [list(tensor.size()) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def jax_settings() -> tuple[Any, ...]:
    """All of JAX's settings, of this process and thread, that a trace depends on: what `jax.jit` keeps its own traces by.

    Without the names of axes, which are those of a transformation that is under way and no setting.
    """
    return (jax().config.jax_default_prng_impl, *_trace_context()()[:-1])


@functools.cache
def _trace_context() -> Callable[[], tuple[Any, ...]]:
    from jax._src import config

    return config.trace_context


def xla_client() -> Any:
    """jaxlib's bindings of XLA's client."""
    from jax._src.lib import xla_client as module

    return module


def jaxlibs_custom_calls(platform: str) -> Collection[str]:
    """The custom calls whose code jaxlib, or a user of `jax.ffi`, has brought into this process for JAX's own XLA."""
    return xla_client().custom_call_targets(platform)


@functools.cache
def calling_primitives(platform: str) -> frozenset[str]:
    """The primitives that JAX may lower to a custom call on a platform: those whose lowering there is one of its own."""
    from jax._src.interpreters import mlir

    own = mlir._platform_specific_lowerings.get(platform, {})
    return frozenset({primitive.name for primitive in own} | {"ffi_call", "pure_callback", "io_callback"})


def stable_custom_calls() -> Collection[str]:
    """The custom calls that JAX promises to understand in later processes and versions, as `jax.export` relies on."""
    from jax._src.export._export import _CUSTOM_CALL_TARGETS_GUARANTEED_STABLE as names

    return names


@functools.cache
def _jaxlib() -> Any:
    from jax._src.lib import _jax

    return _jax


@functools.cache
def _avals_on(device: Any) -> tuple[Any, Callable[..., Any]]:
    """A device as a sharding, and abstract values of arrays on it, kept."""
    jax_ = jax()
    return jax_.sharding.SingleDeviceSharding(device), functools.lru_cache(4096)(jax_.core.ShapedArray)


def array_over(memory: np.ndarray, device: Any) -> Any:
    """A JAX array over NumPy memory that is 64-byte aligned; it holds on to `memory` until `memory_release()()`.

    `jax.dlpack.from_dlpack` would give XLA a deleter of torch's, which XLA calls on a thread of its own after a program's
    results are there, and which waits for the GIL. If the interpreter ends meanwhile, Python ends that thread and with it the
    process: "terminate called without an active exception", exit status 134. What XLA no longer needs of NumPy, jaxlib only
    puts on a list, which Python threads empty. It also takes 4 us, not 16-100.
    """
    place, aval = _avals_on(device)
    return _jaxlib().batched_device_put(aval(memory.shape, memory.dtype), place, [memory], [device], True)


def memory_release() -> Callable[[], None]:
    """A function that lets go of the memory XLA is done with, in 50 ns if there is none.

    JAX does that too, in calls of its own and in Python's collections.
    """
    return _jaxlib().collect_garbage


def tensor_over(array: Any) -> torch.Tensor:
    """A tensor over the memory of an array on one device.

    On CPU this is what `torch.from_dlpack(array)` ends in, without its questions to the array: 1.5 us instead of 7-12.
    """
    if array.platform() != "cpu":
        return torch.from_dlpack(array)
    return torch._C._from_dlpack(_jaxlib().buffer_to_dlpack_managed_tensor(array, stream=None))


def dce_jaxpr(jaxpr: Any) -> tuple[Any, list[bool]]:
    """A jaxpr without what its outputs do not need, and which of its inputs are left."""
    from jax._src.interpreters import partial_eval

    pruned, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[:2]
    return pruned, list(used)


@functools.cache
def _silence_precision_warning() -> None:
    """Torch 2.9 warns once a process when its matmul precision is *read*; the advice is for who sets it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.get_float32_matmul_precision()


def float32_matmul_precision() -> str:
    """`torch.get_float32_matmul_precision()`."""
    _silence_precision_warning()
    return torch.get_float32_matmul_precision()


def with_outputs(jaxpr: Any, outvars: list[Any]) -> Any:
    """A jaxpr with other outputs."""
    names = jaxpr.debug_info._replace(result_paths=("",) * len(outvars))
    return jaxpr.replace(outvars=outvars, debug_info=names)


@functools.cache
def _bare_traceback() -> Any:
    """A JAX traceback that shows nothing but a thread's own start."""
    from jax._src.lib import xla_client

    return in_bare_thread(xla_client.Traceback.get_traceback)


def in_bare_thread(function: Callable[[], Any]) -> Any:
    """The result of a function run where no caller's frames are on the stack; see `without_frames`."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@contextlib.contextmanager
def without_frames() -> Iterator[None]:
    """Trace without the Python frames that JAX would note on every equation, for this thread and scope.

    JAX's tracebacks keep the code objects of all frames alive, Dynamo's compiled frame among them, and Dynamo frees a compiled
    graph when its code object dies: a program that held such a traceback would keep itself, and its model's graph, for ever.
    What JAX makes in C++, executables and long-lived arrays, is made `in_bare_thread` for the same reason. (jaxlib's switch for
    tracebacks is one for the process, and jax 0.10 fails in other threads while it is off.)
    """
    from jax._src import source_info_util

    holder = source_info_util._source_info_context
    before = holder.context
    holder.context = before.replace(traceback=_bare_traceback())
    try:
        yield
    finally:
        holder.context = before


@contextlib.contextmanager
def source_line(frame: tuple[str, int, str] | None) -> Iterator[None]:
    """Let what is traced inside name this file, line and function as its source; nothing changes for None."""
    if frame is None:
        yield
        return
    from jax._src import source_info_util

    holder = source_info_util._source_info_context
    before = holder.context
    holder.context = before.replace(traceback=_traceback_at(*frame))
    try:
        yield
    finally:
        holder.context = before


class _KernelScope(threading.local):
    """Whether this thread is in `kernels_as_written`, and the matmul precision it had before."""

    depth = 0
    precision: Any = None


_kernel_scope = _KernelScope()
_kernel_lock = threading.Lock()
_kernel_scopes = 0


@contextlib.contextmanager
def kernels_as_written() -> Iterator[None]:
    """Trace Pallas kernels, in this thread and scope, under the settings that their authors write for; enter it before others.

    Mosaic has no 64-bit types: with them on, `jnp.zeros` in a kernel is an f64 that no f32 reference takes, and the 0 in an
    index map an i64 that fails to compile. And it refuses a bf16 product of f32 precision, which is what torch's default says.
    Pallas has no switches of its own for these, so its one entry is exchanged while any thread is in such a scope; for other
    threads it does what it did.
    """
    global _kernel_scopes
    module = sys.modules.get("jax._src.pallas.pallas_call")
    if module is None:  # nobody has a kernel yet, and importing Pallas takes long
        yield
        return
    with _kernel_lock:
        if not _kernel_scopes:
            module._pallas_call = functools.partial(_pallas_call_as_written, module._pallas_call)
        _kernel_scopes += 1
    if not _kernel_scope.depth:
        _kernel_scope.precision = jax().config.jax_default_matmul_precision
    _kernel_scope.depth += 1
    try:
        yield
    finally:
        _kernel_scope.depth -= 1
        with _kernel_lock:
            _kernel_scopes -= 1
            if not _kernel_scopes:
                module._pallas_call = module._pallas_call.args[0]


def _pallas_call_as_written(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    call = original(*args, **kwargs)

    def traced(*operands: Any) -> Any:
        wide = any(getattr(leaf, "dtype", None) in _WIDE for leaf in jax().tree.leaves(operands))
        if wide or not _kernel_scope.depth:  # wide operands can only be interpreted, and that takes them as they are
            return call(*operands)
        with jax().enable_x64(False), jax().default_matmul_precision(_kernel_scope.precision):
            return call(*operands)

    return traced


_WIDE = ("int64", "uint64", "float64", "complex128")


@functools.lru_cache(maxsize=4096)
def _traceback_at(file: str, line: int, function: str) -> Any:
    """A JAX traceback that shows one line of a file and keeps none of the caller's code alive."""
    from jax._src.lib import xla_client

    code = compile("traceback = get_traceback()", file, "exec")
    code = code.replace(co_firstlineno=line, co_name=function, co_qualname=function)
    scope = {"get_traceback": xla_client.Traceback.get_traceback}
    in_bare_thread(lambda: exec(code, scope))
    return scope["traceback"]


def donate_buffer(tensor: torch.Tensor) -> bool:
    """Let the next execution reuse an `xla` tensor's memory, if it has memory of its own; whether it does.

    A lazy `clone()` or view has none before the next sync: torch_xla would give away the memory of the tensor it was made from.
    """
    if tensor.device.type != "xla":
        return False
    bindings = torch_xla()._XLAC
    own = "XLAData: None" not in bindings._get_xla_tensor_debug_info(tensor)
    return own and bindings._set_buffer_donation(tensor, True)


def no_autocast() -> contextlib.AbstractContextManager[Any]:
    """A scope in which no device's autocast is on."""
    stack = contextlib.ExitStack()
    for kind in ("cpu", "cuda", "xla"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo neither traces nor enters, nor anything that it calls; it costs 0.5 us a call.

    Dynamo enters every Python frame that runs between two graphs of a compiled function: torch calls the backward of a
    node, the kernel of an operator and the callback of a weak reference there.
    """
    return torch.compiler.disable(function, reason="it belongs to pure_backend")


def unentered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Python's own calls that Dynamo does not enter; unlike `opaque` it costs nothing."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
    return function


@opaque
def callable_in(context: Any, name: str) -> Callable[..., Any] | None:
    """The callable that a local variable of traced code stands for, with guards that it stays so.

    Args:
        context: What `torch._dynamo.comptime` gives, while Dynamo traces the code.
        name: The local's name.

    Returns:
        The callable, or None where it holds what is known only when the code runs, as a lambda over a tensor does.
    """
    from torch._dynamo.exc import Unsupported

    try:
        return _constant(context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker())
    except (NotImplementedError, Unsupported):  # how Dynamo says that a value is no constant
        return None


def _constant(variable: Any) -> Any:
    """The value of one of Dynamo's variables."""
    from torch._dynamo import variables

    variable = variable.realize()
    if isinstance(variable, variables.NestedUserFunctionVariable):
        return _function_of(variable)
    if isinstance(variable, variables.UserMethodVariable):
        return types.MethodType(variable.fn, _constant(variable.obj))
    if isinstance(variable, variables.FunctoolsPartialVariable):
        keywords = {name: _constant(value) for name, value in variable.keywords.items()}
        return functools.partial(_constant(variable.func), *map(_constant, variable.args), **keywords)
    if isinstance(variable, variables.SymNodeVariable):
        return variable.evaluate_expr()
    if isinstance(variable, variables.UserDefinedObjectVariable) and variable.source is None:
        return variable.value
    return variable.guard_as_python_constant()


def _function_of(variable: Any) -> types.FunctionType:
    """A function that traced code defines; `None` stands for what it does not have."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    code, name = variable.get_code(), variable.fn_name.as_python_constant()
    load = InstructionTranslator.current_tx().output.side_effects.load_cell
    cells = variable.closure.items if variable.closure else ()
    closure = tuple(types.CellType(_constant(load(cell))) for cell in cells)
    defaults = variable.defaults and _constant(variable.defaults)
    function = types.FunctionType(code, variable.f_globals, name, defaults, closure)
    function.__kwdefaults__ = variable.kwdefaults and _constant(variable.kwdefaults)
    return function


def forget_captures(code: Any, scope: dict[str, Any], backend: Any) -> None:
    """Let go of what Dynamo keeps of the compiled frames of a code object that nobody calls any more.

    A code object owns its captures, and these would own it: `orig_code_map` leads from each to the code. What they call lies in
    the function's globals, `scope`; it goes at once, since JAX may have noted the code in a traceback that stays.
    To reset the code would not do: this may run while Dynamo itself resets it, which Dynamo does not survive.
    """
    from torch._dynamo import eval_frame, utils

    if eval_frame.cached_backends.get(id(backend)) is backend:
        del eval_frame.cached_backends[id(backend)]
    for key in [key for key, original in utils.orig_code_map.values.items() if original is code]:
        utils.orig_code_map._remove_id(key)
    utils.guard_failures.pop(code, None)
    scope.update({name: None for name in scope if name.startswith("__compiled_fn")})
    forget_bytecode()


def forget_bytecode() -> None:
    """Let Dynamo forget the instructions that it has read, by which it keeps the last 128 code objects alive."""
    from torch._dynamo import bytecode_transformation

    bytecode_transformation._cached_cleaned_instructions.cache_clear()


SymbolicGuards = Callable[[dict[str, float]], bool]


def symbolic_guards(gm: torch.fx.GraphModule) -> SymbolicGuards:
    """What Dynamo assumed of the floats that are inputs of a graph, as a check of new values by input name.

    Call it in a backend, while Dynamo's tracing context is there.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    shape_env = torch._guards.TracingContext.get().fake_mode.shape_env
    items = gm.graph.find_nodes(op="call_method", target="item")
    symbols = {str(node.args[0].target): node.meta["example_value"].node.expr for node in items}
    names = {symbol: name for name, symbol in symbols.items()}
    guards = [guard.expr for guard in shape_env.guards if guard.expr.free_symbols and guard.expr.free_symbols <= set(names)]

    def check(values: dict[str, float]) -> bool:
        return all(
            sympy_interp(PythonReferenceAnalysis, {s: values[names[s]] for s in guard.free_symbols}, guard) for guard in guards
        )

    return check


@contextlib.contextmanager
def capturing_more() -> Iterator[None]:
    """A scope in which Dynamo captures recurrent layers, and `torch_xla.device()` as the device that it gives."""
    with torch._dynamo.config.patch(allow_rnn=True), contextlib.ExitStack() as stack:
        for owner, name, value in _capturable_torch_xla():
            stack.enter_context(unittest.mock.patch.object(owner, name, value, create=True))
        yield


@functools.cache
def _capturable_torch_xla() -> list[tuple[Any, str, Any]]:
    """What Dynamo needs to capture functions of torch_xla: attributes of objects of its, and other values for them."""
    module = sys.modules.get("torch_xla")
    if module is None:
        return []
    from torch_xla.core import xla_model
    from torch_xla.experimental.gru import GRU

    constants = [(function, "_dynamo_marked_constant", True) for function in (module.device, xla_model.xla_device)]
    return [*constants, (GRU, "forward", torch.nn.modules.rnn.GRU.forward)]  # it is put in the place of torch's own
