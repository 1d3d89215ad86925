"""Ask what the compiler did, and what it runs on."""

from typing import TYPE_CHECKING, Any

from pure_backend.inspect.environment import Environment as Environment
from pure_backend.inspect.environment import Problem as Problem
from pure_backend.inspect.environment import report_environment as report_environment
from pure_backend.inspect.explain import explain as explain
from pure_backend.inspect.found import Break as Break
from pure_backend.inspect.found import Graph as Graph
from pure_backend.inspect.found import Node as Node
from pure_backend.inspect.found import Partition as Partition
from pure_backend.inspect.profiling import make_xla_traces_traceable as make_xla_traces_traceable
from pure_backend.inspect.profiling import scope as scope
from pure_backend.inspect.report import Report as Report

if TYPE_CHECKING:
    from pure_backend.inspect.tpu import TPUProgram as TPUProgram
    from pure_backend.inspect.tpu import compile_for_tpu as compile_for_tpu


def __getattr__(name: str) -> Any:
    """Names whose module imports JAX, which `import pure_backend` does not."""
    if name not in ("TPUProgram", "compile_for_tpu"):
        raise AttributeError(f"module 'pure_backend.inspect' has no attribute {name!r}")
    from pure_backend.inspect import tpu

    return getattr(tpu, name)
