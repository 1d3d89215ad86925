"""Pallas kernels: traced as their authors wrote them, and interpreted, as plain HLO, where no Mosaic compiler is.

A kernel's author writes `pl.pallas_call(...)` and no flag. Whether it is interpreted is known when its program is lowered, from
the platform; so the flag is set in the jaxpr then, wherever in it a kernel stands.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax


def interpreted(jaxpr: Any) -> Any:
    """An open jaxpr with its kernels interpreted; the same object if it has none."""
    eqns = [_interpreted(eqn) for eqn in jaxpr.eqns]
    same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _interpreted(eqn: Any) -> Any:
    if eqn.primitive.name != "pallas_call" or eqn.params["interpret"]:
        return eqn
    return eqn.replace(params={**eqn.params, "interpret": True})


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
        _kernel_scope.precision = jax.config.jax_default_matmul_precision
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
        wide = any(getattr(leaf, "dtype", None) in _WIDE for leaf in jax.tree.leaves(operands))
        if wide or not _kernel_scope.depth:  # wide operands can only be interpreted, and that takes them as they are
            return call(*operands)
        with jax.enable_x64(False), jax.default_matmul_precision(_kernel_scope.precision):
            return call(*operands)

    return traced


_WIDE = ("int64", "uint64", "float64", "complex128")
