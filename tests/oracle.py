"""Eager PyTorch as the oracle: run a function eagerly and compiled, and compare all that its caller can see."""

import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import pure_backend

COTANGENT_SEED = 7


def compiled(f: Callable, **compile_kwargs) -> Callable:
    """`f` under `torch.compile` with the backend under test."""
    return torch.compile(f, backend="assume_pure", **compile_kwargs)


@dataclasses.dataclass(frozen=True)
class Observed:
    """What one side showed its caller.

    Attributes:
        outputs: What the function returned.
        args: Its arguments, after the call.
        leaves: Every leaf of outputs, arguments and module state by name, after the call.
        grads: Gradient of every leaf input that requires one, by name; `None` where there is none.
    """

    outputs: Any
    args: tuple
    leaves: dict[str, Any]
    grads: dict[str, torch.Tensor | None]

    def cpu(self, name: str) -> torch.Tensor:
        """The leaf `name`, detached and on the CPU."""
        return self.leaves[name].detach().cpu()


def agree(
    f: Callable,
    make_args: Callable[[], tuple],
    *,
    device: str | torch.device = "cpu",
    tol: float = 1e-5,
    grad: bool = False,
    pure: bool = False,
    **compile_kwargs,
) -> Observed:
    """Assert that `f` compiled on `device` shows its caller what `f` run eagerly on the CPU shows.

    Compared are outputs *and* arguments afterwards: values, dtype, shape, `requires_grad`, non-tensors by `==`; on the
    CPU also which of them are one object and which share storage. A module is copied for each side, and its parameters
    and buffers are compared too.

    Args:
        f: A function or a module.
        make_args: Builds the arguments afresh, with the same values each time. Tensors that require grad are leaves.
        device: Where the compiled side runs.
        tol: Relative and absolute tolerance.
        grad: Also compare the gradients of all leaves, under fixed random cotangents.
        pure: Also assert that compiled code of the backend ran.
        **compile_kwargs: For `torch.compile`.

    Returns:
        What the compiled side showed.
    """
    torch._dynamo.reset()
    device = torch.device(device)
    eager, other = _own(f, torch.device("cpu")), _own(f, device)
    want = _observe(eager, eager, make_args(), grad)
    calls = pure_backend.statistics().calls
    got = _observe(compiled(other, **compile_kwargs), other, move(make_args(), device), grad)
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()  # one compilation for all that is compared, else it is one for each tensor
    _same_leaves(want.leaves, got.leaves, device, tol)
    if device.type == "cpu":
        _same_aliasing(want.leaves, got.leaves)
    _same_grads(want.grads, got.grads, tol)
    assert not pure or pure_backend.statistics().calls > calls, "no compiled partition ran"
    return got


def both_raise(f: Callable, make_args: Callable[[], tuple], *, device: str | torch.device = "cpu", **compile_kwargs):
    """Assert that `f` raises eagerly on the CPU and also when compiled on `device`; return both exceptions."""
    torch._dynamo.reset()
    device = torch.device(device)
    want = _raised(_own(f, torch.device("cpu")), make_args())
    got = _raised(compiled(_own(f, device), **compile_kwargs), move(make_args(), device))
    assert want is not None, "eager does not raise"
    assert got is not None, f"eager raises {want!r}, compiled does not"
    return want, got


def _raised(f: Callable, args: tuple) -> Exception | None:
    try:
        for _, leaf in named_leaves(f(*args)):
            if isinstance(leaf, torch.Tensor):
                leaf.cpu()  # lazy devices raise late
    except Exception as error:
        return error
    return None


def on_lowering(monkeypatch: Any, note: Callable[[Any, Any], None]) -> None:
    """Call `note(jaxpr, lowered)` for each program that a runtime lowers from now on."""
    original = importlib.import_module("pure_backend.jax_bridge.lower").lower

    def lower(jaxpr: Any, *rest: Any) -> Any:
        lowered = original(jaxpr, *rest)
        note(jaxpr, lowered)
        return lowered

    for name in ("jax", "xla"):
        monkeypatch.setattr(importlib.import_module(f"pure_backend.jax_bridge.runtimes.{name}"), "lower", lower)


# ---------------------------------------------------------------------------------------------------- trees


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings, sequences and dataclasses with their paths, e.g. `output[0].logits`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_leaves(value, f"{name}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from named_leaves(value, f"{name}[{index}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from named_leaves(getattr(tree, field.name), f"{name}.{field.name}")
    else:
        yield name, tree


def move(tree: Any, device: torch.device, memo: dict[int, torch.Tensor] | None = None) -> Any:
    """`tree` with its tensors on `device`: the tree itself on the CPU; elsewhere one object stays one object."""
    memo = {} if memo is None else memo
    if device.type == "cpu":
        return tree
    if isinstance(tree, torch.Tensor):
        return memo.setdefault(id(tree), _move_tensor(tree, device))
    if isinstance(tree, Mapping):
        items = {key: move(value, device, memo) for key, value in tree.items()}
        return items if type(tree) is dict else type(tree)(**items)
    if isinstance(tree, tuple | list):
        items = [move(value, device, memo) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return dataclasses.replace(tree, **{name: move(getattr(tree, name), device, memo) for name in names})
    return tree


def _move_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _own(f: Callable, device: torch.device) -> Callable:
    """A module's own copy on `device`, with tied parameters still tied (`Module.to` unties them on `xla`)."""
    if not isinstance(f, nn.Module):
        return f
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in f.named_parameters(remove_duplicate=False)}
    f = copy.deepcopy(f).to(device)
    for name, original in names.items():
        if name != original:
            owner, _, attribute = name.rpartition(".")
            setattr(f.get_submodule(owner), attribute, f.get_parameter(original))
    return f


# ---------------------------------------------------------------------------------------------------- observing


def _observe(call: Callable, f: Callable, args: tuple, grad: bool) -> Observed:
    inputs = dict(named_leaves(args, "argument")) | _state(f)
    starts = {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    assert all(t.is_leaf for t in starts.values()), "arguments that require grad must be leaves"
    torch.manual_seed(1)
    outputs = call(*args)
    leaves = dict(named_leaves(outputs, "output")) | dict(named_leaves(args, "argument")) | _state(f)
    if grad:
        _backward(leaves)
    return Observed(outputs, args, leaves, {name: t.grad for name, t in starts.items()} if grad else {})


def _state(f: Callable) -> dict[str, torch.Tensor]:
    if not isinstance(f, nn.Module):
        return {}
    parameters, buffers = f.named_parameters(remove_duplicate=False), f.named_buffers(remove_duplicate=False)
    return {f"parameter {name}": t for name, t in parameters} | {f"buffer {name}": t for name, t in buffers}


def _backward(leaves: dict[str, Any]) -> None:
    """Backward from every output that requires grad, and from every argument that the call made depend on one."""
    heads = [
        t
        for name, t in leaves.items()
        if isinstance(t, torch.Tensor) and t.requires_grad and (name.startswith("output") or not t.is_leaf)
    ]
    assert heads, "grad=True, but nothing to differentiate"
    heads = list({id(t): t for t in heads}.values())
    generator = torch.Generator().manual_seed(COTANGENT_SEED)
    cotangents = [torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device) for t in heads]
    torch.autograd.backward(heads, cotangents)


# ---------------------------------------------------------------------------------------------------- comparing


def _same_leaves(want: dict[str, Any], got: dict[str, Any], device: torch.device, tol: float) -> None:
    assert list(want) == list(got), f"other structure: eager {list(want)}, compiled {list(got)}"
    for name, leaf in want.items():
        same(leaf, got[name], name, tol)
        if isinstance(leaf, torch.Tensor):
            assert got[name].device.type == device.type, f"{name}: on {got[name].device}, want {device}"


def same(want: Any, got: Any, name: str = "value", tol: float = 1e-5) -> None:
    """Assert that one leaf of the compiled side equals eager's, in dtype, shape, `requires_grad` and value."""
    if not isinstance(want, torch.Tensor):
        assert type(want) is type(got) and want == got, f"{name}: eager {want!r}, compiled {got!r}"
        return
    assert isinstance(got, torch.Tensor), f"{name}: eager gives a tensor, compiled {got!r}"
    for what in ("dtype", "shape", "requires_grad"):
        a, b = getattr(want, what), getattr(got, what)
        assert a == b, f"{name}: {what} is {a} in eager, {b} compiled"
    _close(want, got, name, tol)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def _close(want: torch.Tensor, got: torch.Tensor, name: str, tol: float) -> None:
    torch.testing.assert_close(
        _plain(got),
        _plain(want),
        rtol=tol,
        atol=tol,
        equal_nan=True,
        msg=lambda text: f"{name}: compiled differs from eager\n{text}\ncompiled {got}\neager {want}",
    )


def _same_grads(want: dict, got: dict, tol: float) -> None:
    for name, grad in want.items():
        other = got[name]
        assert (grad is None) == (other is None), f"gradient of {name}: eager {grad}, compiled {other}"
        if grad is not None:
            same(grad, other, f"gradient of {name}", tol)


def _same_aliasing(want: dict[str, Any], got: dict[str, Any]) -> None:
    for what in (_objects, _storages):
        a, b = what(want), what(got)
        for name in a:
            assert a[name] == b[name], f"{name}: {what.__doc__} is {a[name]} in eager, {b[name]} compiled"


def _objects(leaves: dict[str, Any]) -> dict[str, str]:
    """the first leaf that is the same object"""
    return _first(leaves, id)


def _storages(leaves: dict[str, Any]) -> dict[str, tuple]:
    """(the first leaf of the same storage, its layout therein)"""
    first = _first(leaves, lambda t: t.untyped_storage()._cdata)
    shared = {a for name, a in first.items() if a != name}
    return {name: (a, _layout(leaves[name]) if a in shared else None) for name, a in first.items()}


def _first(leaves: dict[str, Any], key: Callable[[torch.Tensor], int]) -> dict[str, str]:
    seen: dict[int, str] = {}
    return {name: seen.setdefault(key(t), name) for name, t in leaves.items() if isinstance(t, torch.Tensor)}


def _layout(tensor: torch.Tensor) -> tuple:
    """Offset and strides; those of an empty tensor or of a dimension of size one mean nothing."""
    if tensor.numel() == 0:
        return ()
    strides = tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return tensor.storage_offset(), strides
