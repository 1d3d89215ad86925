"""Dynamo beyond `torch.compile`: what a traced variable stands for, what a capture assumed, what Dynamo keeps alive."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pure_backend.ir.opaque import opaque


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
