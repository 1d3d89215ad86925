"""What `python -m pure_backend explain FILE:FUNCTION` and `plan FILE:FUNCTION` name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pure_backend.inspect.explain import explain
from pure_backend.inspect.report import Report

_MODULE_NAME = "explained"


class TargetError(ValueError):
    """The words after the command do not name something that it can take."""


def explain_target(target: str) -> Report:
    """The report of what a function in a file returns.

    Args:
        target: `FILE:FUNCTION`. The function takes no arguments and returns `(fn, args)` or `(fn, args, kwargs)`.

    Raises:
        TargetError: There is no such file or function, or it returns something else.
    """
    fn, args, kwargs = call_of(target)
    return explain(fn)(*args, **kwargs)


def call_of(target: str) -> tuple[Callable[..., Any], tuple, dict]:
    """What a function in a file returns: something to call, its arguments and keywords, see `explain_target`."""
    made = _function(target)()
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]) and isinstance(made[1], (tuple, list)):
        kwargs = made[2] if len(made) == 3 else {}
        if isinstance(kwargs, dict):
            return made[0], tuple(made[1]), kwargs
    shown = f"a tuple of {', '.join(type(part).__name__ for part in made)}" if isinstance(made, tuple) else type(made).__name__
    raise TargetError(
        f"{target} returned {shown}: it is to return a function or module and a tuple of its arguments, "
        "`return model, (x,)`, or also its keyword arguments, `return model, (x,), {'mask': mask}`"
    )


def _function(target: str) -> Callable[[], Any]:
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise TargetError(f"{target!r} is not FILE:FUNCTION, such as model.py:example")
    if not path.is_file():
        raise TargetError(f"there is no file {file!r}")
    module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == _MODULE_NAME and callable(value)
        ]
        raise TargetError(f"{file} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    return function


def _load(path: Path) -> ModuleType:
    """The file as a module, with its folder on the path as `python FILE` has it."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{str(path)!r} is not a Python file")
    module = sys.modules[_MODULE_NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
