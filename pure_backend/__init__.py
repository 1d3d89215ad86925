"""pure_backend: a `torch.compile` backend that runs pure graphs as cached JAX programs.

Example:
    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> compiled = torch.compile(model, backend="assume_pure")
    >>> compiled(torch.ones(3, 4)).shape
    torch.Size([3, 2])
"""

from typing import TYPE_CHECKING, Any

from pure_backend.counters import Statistics as Statistics
from pure_backend.counters import reset_statistics as reset_statistics
from pure_backend.counters import statistics as statistics
from pure_backend.errors import AccuracyError as AccuracyError
from pure_backend.errors import DeviceError as DeviceError
from pure_backend.errors import DonationError as DonationError
from pure_backend.errors import EnvironmentMismatchError as EnvironmentMismatchError
from pure_backend.errors import ImpureGraphError as ImpureGraphError
from pure_backend.errors import LoweringError as LoweringError
from pure_backend.errors import PureBackendError as PureBackendError
from pure_backend.errors import RanksDisagreeError as RanksDisagreeError
from pure_backend.errors import UnsupportedOperatorError as UnsupportedOperatorError
from pure_backend.fx_passes.effects import impure as impure
from pure_backend.inspect.explain import explain as explain
from pure_backend.inspect.profiling import make_xla_traces_traceable as make_xla_traces_traceable
from pure_backend.inspect.profiling import scope as scope
from pure_backend.inspect.report import Report as Report
from pure_backend.logs import set_logs as set_logs
from pure_backend.logs import set_logs_from_environment
from pure_backend.options import Options as Options

if TYPE_CHECKING:
    from pure_backend.custom_ops.jax_op import CustomOpDef as CustomOpDef
    from pure_backend.custom_ops.jax_op import jax_op as jax_op
    from pure_backend.transforms.call_jax import call_jax as call_jax
    from pure_backend.transforms.layers import scan_layers as scan_layers
    from pure_backend.transforms.loops import fori_loop as fori_loop
    from pure_backend.transforms.loops import scan as scan
    from pure_backend.transforms.loops import while_loop as while_loop
    from pure_backend.transforms.pure import ImpureFunctionWarning as ImpureFunctionWarning
    from pure_backend.transforms.pure import PureModule as PureModule
    from pure_backend.transforms.pure import assume_pure as assume_pure
    from pure_backend.transforms.train_step import TrainStep as TrainStep
    from pure_backend.transforms.xla_sharding import XlaSharding as XlaSharding

__version__ = "0.1.0"

set_logs_from_environment()

_LATER = {
    "custom_ops.jax_op": ("CustomOpDef", "jax_op"),
    "transforms.call_jax": ("call_jax",),
    "transforms.layers": ("scan_layers",),
    "transforms.loops": ("fori_loop", "scan", "while_loop"),
    "transforms.pure": ("ImpureFunctionWarning", "PureModule", "assume_pure"),
    "transforms.train_step": ("TrainStep",),
    "transforms.xla_sharding": ("XlaSharding",),
}


def __getattr__(name: str) -> Any:
    """Names whose modules import JAX or Dynamo, which `import pure_backend` does not."""
    import importlib

    if name == "distributed":
        return importlib.import_module("pure_backend.distributed")
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"pure_backend.{module}"), name)
    raise AttributeError(f"module 'pure_backend' has no attribute {name!r}")


def clear_caches() -> None:
    """Forget every program and every view of a tensor in memory; compiled models go on with what they hold.

    What is on disk stays: `python -m pure_backend cache --clear` removes it.
    """
    import sys

    if (compiler := sys.modules.get("pure_backend.jax_bridge.compile")) is not None:
        compiler.clear()
