"""Does it work on this machine? `python -m pure_backend check`: small checks with times, on every device that is there.

Each check runs something twice, as a user would, and its twin in eager on the CPU. The first call
compiles; the second must not trace again.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import pure_backend

# Of the norm of eager's result. TPUs and GPUs multiply f32 matrices in a shorter format by default.
BOUNDS = {"cpu": 1e-4, "cuda": 1e-2, "xla": 2e-2}

Call = Callable[[], Any]


@dataclass(frozen=True)
class Outcome:
    """What one check on one device showed.

    Attributes:
        check: What ran.
        device: The type of the device.
        first_s: Seconds of the first call, compilation included.
        again_s: Seconds of the second call.
        error: The larger relative difference of the two calls to eager.
        problem: What went wrong, empty if nothing did.
    """

    check: str
    device: str
    first_s: float
    again_s: float
    error: float
    problem: str


def devices() -> list[torch.device]:
    """The devices that this process can use: the CPU, a GPU that torch and JAX both see, and torch_xla's."""
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        import jax

        if any(device.platform == "gpu" for device in jax.local_devices()):
            found.append(torch.device("cuda"))
    if importlib.util.find_spec("torch_xla") is not None:
        import torch_xla

        found.append(torch_xla.device())
    return found


def run_checks(device: torch.device) -> Iterator[Outcome]:
    """Run every check on a device, one after the other.

    Args:
        device: `cpu`, `cuda` or `xla`.

    Yields:
        What each check showed, also when it raised.
    """
    for name, check in CHECKS.items():
        torch._dynamo.reset()
        pure_backend.clear_caches()
        torch.manual_seed(0)
        yield _outcome(name, device, check)


def _outcome(name: str, device: torch.device, check: Callable[[torch.device], tuple[Call, Call]]) -> Outcome:
    seconds, error = [0.0, 0.0], 0.0
    try:
        ours, eager = check(device)
        for turn in range(2):
            traces = pure_backend.statistics().traces
            started = time.perf_counter()
            got = _on_cpu(ours())
            seconds[turn] = time.perf_counter() - started
            error = _worst([error, _difference(eager(), got)])
        problem = "the second call traced again" if pure_backend.statistics().traces > traces else ""
        if not error <= BOUNDS[device.type]:
            problem = f"it differs from eager by more than {BOUNDS[device.type]:g}"
    except Exception as failure:  # whatever it is, it is what the table has to show
        problem = f"{type(failure).__name__}: {failure}"
    return Outcome(name, device.type, *seconds, error, problem)


def _on_cpu(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), tree)


def _difference(want: Any, got: Any) -> float:
    """The largest relative difference between two trees of tensors."""
    pairs = zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True)
    return _worst([_relative(a.detach().double(), b.double()) for a, b in pairs])


def _worst(errors: list[float]) -> float:
    return torch.tensor(errors).max().item()  # NaN if one is NaN, which Python's max may pass over


def _relative(want: torch.Tensor, got: torch.Tensor) -> float:
    return ((want - got).norm() / want.norm().clamp(min=1e-3)).item()


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="assume_pure", dynamic=False)


def _function(f: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[torch.device], tuple[Call, Call]]:
    """A check that a function of random f32 tensors gives eager's result."""

    def check(device: torch.device) -> tuple[Call, Call]:
        inputs = [torch.randn(shape) for shape in shapes]
        compiled, there = _compiled(f), [t.to(device) for t in inputs]
        return lambda: compiled(*there), lambda: f(*inputs)

    return check


class _Block(nn.Module):
    """A transformer's layer, f32[batch, seq, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.norms = nn.ModuleList([nn.LayerNorm(256), nn.LayerNorm(256)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _model() -> nn.Module:
    return nn.Sequential(nn.Embedding(512, 256), _Block(), nn.Linear(256, 512))


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(4 * 65).mul(7).remainder(512).view(4, 65)
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def _steps(step: Callable[..., torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The losses of three steps."""
    losses = []
    for _ in range(3):
        losses.append(step(*_batch(device)))
        _sync(device)
    return losses


def _sync(device: torch.device) -> None:
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def _trainer(model: nn.Module, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(forward(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _training(device: torch.device) -> tuple[Call, Call]:
    """Three steps of a decoder, its parameters changed in place, twice."""
    eager, model = _model(), nn.Module()
    model = copy.deepcopy(eager).to(device)
    step, twin = _trainer(model, _compiled(model)), _trainer(eager, eager)
    return lambda: _steps(step, device), lambda: _steps(twin, torch.device("cpu"))


def _whole_step(device: torch.device) -> tuple[Call, Call]:
    """The same with the optimizer inside of the program."""
    eager = _model()
    model = copy.deepcopy(eager).to(device)
    step = pure_backend.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), _loss)
    twin = _trainer(eager, eager)
    return lambda: _steps(step, device), lambda: _steps(twin, torch.device("cpu"))


def _random(device: torch.device) -> tuple[Call, Call]:
    """Dropout is fresh at every call and follows the seed; what is compared is three facts."""
    compiled, x = _compiled(lambda x: F.dropout(x, 0.5)), torch.ones(4096, device=device)

    def seeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return compiled(x).cpu()

    def facts() -> torch.Tensor:
        first, other, again = seeded(1), seeded(2), seeded(1)
        half = abs((first == 0).float().mean().item() - 0.5) < 0.05
        return torch.tensor([first.equal(again), not first.equal(other), half])

    return facts, lambda: torch.ones(3)


def _from_disk(device: torch.device) -> tuple[Call, Call]:
    """A program that memory has forgotten comes from the disk cache, where that is switched on."""
    from pure_backend.jax_bridge.disk_cache import disk_cache

    f, x = (lambda x: (x @ x.T).tanh()), torch.randn(256, 256) / 16
    _compiled(f)(x.to(device))
    torch._dynamo.reset()
    pure_backend.clear_caches()
    traces = pure_backend.statistics().traces
    compiled = _compiled(f)

    def ours() -> torch.Tensor:
        result = compiled(x.to(device))
        if disk_cache() is not None and pure_backend.statistics().traces > traces:
            raise RuntimeError("the disk cache did not have the program that was put into it")
        return result

    return ours, lambda: f(x)


def _kernel(device: torch.device) -> tuple[Call, Call]:
    """A Pallas kernel of the package, compiled on TPU and interpreted elsewhere."""
    from pure_backend.custom_ops import kernels

    x, weight = torch.randn(128, 256), torch.randn(256)
    there = [t.to(device) for t in (x, weight)]
    compiled = _compiled(lambda x, w: kernels.rms_norm(x, w))
    return lambda: compiled(*there), lambda: F.rms_norm(x, (256,), weight, 1e-6)


@functools.cache
def _scaled() -> Any:
    import jax
    import jax.numpy as jnp

    def scaled(x: jax.Array, by: float = 2.0) -> jax.Array:
        return jnp.sin(x) * by

    scaled.__annotations__ = {"x": jax.Array, "by": float, "return": jax.Array}
    return pure_backend.jax_op("pure_backend_check::scaled")(scaled)


def _custom_op(device: torch.device) -> tuple[Call, Call]:
    """A JAX function as a torch operator, forward and backward."""
    op, x = _scaled(), torch.randn(64, 64)
    there = x.to(device).requires_grad_()
    compiled = _compiled(lambda x: op(x, by=3.0).square().sum())

    def ours() -> Any:
        return torch.autograd.grad(compiled(there), there)

    return ours, lambda: (9 * (2 * x).sin(),)


def _written(x: torch.Tensor) -> Any:
    y = x.clone()
    y[1::2].mul_(3)
    y.t()[0] = y.sum(0)[0]
    return y, y.index_add(0, torch.tensor([0, 2, 2, 5], device=x.device), y[:4]), y.diagonal()


@pure_backend.impure
def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.max()


def _impure(x: torch.Tensor) -> torch.Tensor:
    """What `_largest` returns is computed in eager between two programs."""
    x = (x * 2).sin().cos() + 1
    return ((x + _largest(x)).exp() - x).tanh()


CHECKS: dict[str, Callable[[torch.device], tuple[Call, Call]]] = {
    "products, f32": _function(lambda x, w: F.gelu(x @ w), (256, 512), (512, 512)),
    "products, bf16": _function(lambda x: (x.bfloat16() @ x.bfloat16().T).float(), (256, 512)),
    "convolution": _function(lambda x, w: F.conv2d(x, w, padding=1), (2, 8, 32, 32), (16, 8, 3, 3)),
    "writes and views": _function(_written, (64, 64)),
    "impure node": _function(_impure, (64, 64)),
    "random numbers": _random,
    "training": _training,
    "TrainStep": _whole_step,
    "JAX operator": _custom_op,
    "Pallas kernel": _kernel,
    "disk cache": _from_disk,
}


def report(outcomes: Sequence[Outcome]) -> Any:
    """The outcomes as a table, for `rich.print`."""
    from rich.table import Table

    table = Table("device", "check")
    for title in ("first s", "again ms", "error"):
        table.add_column(title, justify="right")
    table.add_column("result")
    for o in outcomes:
        result = f"[red]{o.problem}" if o.problem else "[green]passed"
        table.add_row(o.device, o.check, f"{o.first_s:.2f}", f"{1e3 * o.again_s:.1f}", f"{o.error:.0e}", result)
    return table
