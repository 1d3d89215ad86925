"""Instructions in the HLO of programs, as made and as XLA:CPU optimizes them, ours beside those of torch_xla's `openxla`.

    PJRT_DEVICE=CPU JAX_PLATFORMS=cpu python benchmarks/hlo.py

The programs of `openxla` are the graphs that AOTAutograd makes, traced lazily on `xla` tensors, as that backend does. The
modules of both peers are compiled by JAX's XLA with its default options. Ours are traced without `repeats`, which would
hide layers in calls of one function. By default our backward computes cheap values anew that `openxla` keeps; with
`remat=none` it keeps them too.

The last table counts products and reshapes of single operators: one dot for each product, no reshape that merges
dimensions.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable

import jax
import torch
from _measure import arguments, console, print_machine, print_table, verdict
from _models import DecoderLoss
from jax._src.lib import xla_client
from rich.progress import track
from torch import nn

import pure_backend

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
COUNTED = ("dot", "convolution", "transpose", "reshape", "copy")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(", re.MULTILINE)

Model = tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]
"""What makes a model whose result is a scalar, and its arguments."""

Modules = dict[str, bytes]
"""Serialized HLO modules by direction, "forward" and "backward"."""


def ours(model: nn.Module, *args: torch.Tensor, remat: str = "auto") -> Modules:
    """The backend's programs."""
    report = pure_backend.explain(model, repeats="off", remat=remat)(*args)
    directions = ("forward", "backward")
    return {side: _of_stablehlo(report.hlo(0, "stablehlo", side)) for side in directions}


def openxla(model: nn.Module, *args: torch.Tensor) -> Modules:
    """What torch_xla traces for the backend `openxla`."""
    import torch_xla
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    texts: list[str] = []

    def record(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        def call(*args):
            results = gm(*args)
            texts.append(torch_xla._XLAC._get_xla_tensors_hlo([r for r in results if isinstance(r, torch.Tensor)]))
            return results

        return make_boxed_func(call)

    device = torch_xla.device()
    model, args = model.to(device), tuple(arg.to(device) for arg in args)
    torch_xla.sync(wait=True)
    loss = torch.compile(model, backend=aot_autograd(fw_compiler=record))(*args)
    torch_xla.sync(wait=True)  # or the backward's graph has the forward in it
    loss.backward()
    return {side: _of_text(text) for side, text in zip(("forward", "backward"), texts, strict=True)}


# ----------------------------------------------------------------------------------------------------- modules and their text


def _of_stablehlo(text: str) -> bytes:
    return xla_client._xla.mlir.mlir_module_to_xla_computation(text).as_serialized_hlo_module_proto()


def _of_text(text: str) -> bytes:
    return xla_client._xla.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def made(module: bytes) -> str:
    """The text of a module as it was made."""
    return xla_client.XlaComputation(module).as_hlo_text()


def optimized(module: bytes) -> str:
    """Its text after XLA has compiled it."""
    stablehlo = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))
    devices = jax.devices("cpu")[:1]
    options = xla_client.CompileOptions()
    executable = devices[0].client.compile_and_load(stablehlo, xla_client._xla.DeviceList(tuple(devices)), options)
    return executable.hlo_modules()[0].to_string()


def count(text: str) -> Counter[str]:
    """Instructions by name, without the parameters and results of computations."""
    found = Counter(_INSTRUCTION.findall(text))
    for name in ("parameter", "tuple", "get-tuple-element"):
        found.pop(name, None)
    return found


# --------------------------------------------------------------------------------------------------------------------- tables


def models(quick: bool) -> dict[str, Model]:
    """The models by name."""
    layers, pixels = (1, 32) if quick else (4, 64)
    chosen: dict[str, Model] = {
        f"seed decoder, {layers} layers": (lambda: DecoderLoss(layers), (torch.zeros(2, 9, dtype=torch.long),))
    }
    if importlib.util.find_spec("torchvision"):
        chosen["ResNet-18"] = (_resnet18, (torch.randn(2, 3, pixels, pixels),))
    return chosen


class _Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(*args).square().sum()


def _resnet18() -> nn.Module:
    import torchvision

    return _Summed(torchvision.models.resnet18())


def compare(title: str, make: Callable[[], nn.Module], args: tuple[torch.Tensor, ...]) -> None:
    """Count the instructions of a model's programs."""
    peers = {"assume_pure": ours, "assume_pure, remat=none": functools.partial(ours, remat="none")}
    peers |= {"openxla": openxla} if HAS_XLA else {}
    rows = []
    for peer, modules_of in track(peers.items(), description=title, console=console, transient=True):
        torch._dynamo.reset()
        for side, module in modules_of(make(), *args).items():
            for stage, text in (("as made", made(module)), ("optimized", optimized(module))):
                found = count(text)
                rows.append((side, stage, peer, str(found.total()), *(str(found[name]) for name in COUNTED)))
    rows.sort(key=lambda row: (row[0] == "backward", row[1]))
    print_table(f"{title}: instructions", ("direction", "HLO", "peer", "all", *COUNTED), rows)


class _Einsum(nn.Module):
    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__()
        self.equation = equation
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, x, self.weight)


def products() -> None:
    """Dots and reshapes of operators that are one product, as made: one dot forward, two backward."""
    x = torch.randn(2, 3, 8, requires_grad=True)
    operators = {
        "Linear on [2, 3, 8]": nn.Linear(8, 5),
        "einsum bsd,de->bse": _Einsum("bsd,de->bse", 8, 5),
        "einsum bsd,bde->bse": _Einsum("bsd,bde->bse", 2, 8, 5),
        "einsum bsd,dhe->bhse": _Einsum("bsd,dhe->bhse", 8, 4, 5),
    }
    rows, most = [], 0.0
    for name, module in operators.items():
        torch._dynamo.reset()
        for side, program in ours(module, x).items():
            found = count(made(program))
            most = max(most, found["dot"] / {"forward": 1, "backward": 2}[side])
            rows.append((name, side, *(str(found[n]) for n in ("dot", "reshape", "transpose"))))
    print_table("single operators, as made", ("operator", "direction", "dot", "reshape", "transpose"), rows)
    verdict("the most dots for one product", most, 1.0, "dots")


def main() -> None:
    """Count and print."""
    args = arguments(__doc__, rounds=1).parse_args()
    print_machine()
    for title, (make, inputs) in models(args.quick).items():
        compare(title, make, inputs)
    products()


if __name__ == "__main__":
    main()
