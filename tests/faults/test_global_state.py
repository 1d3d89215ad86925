"""Nothing outside of this package is other than it was, neither after its import nor after a compile."""

import json
import os
import subprocess
import sys

import pytest

STATE = """
import json, os, sys, warnings
import torch, jax

def state():
    table = torch._decomp.global_decomposition_table["post_autograd"]
    return {
        "privateuse1": [torch._C._get_privateuse1_backend_name(), torch.utils.backend_registration._privateuse1_backend_name],
        "accelerator": str(torch.accelerator.current_accelerator()),
        "device modules": [name in vars(torch) for name in ("jax", "privateuseone")] + ["torch.jax" in sys.modules],
        "mha fastpath": torch.backends.mha.get_fastpath_enabled(),
        "environment": dict(os.environ),
        "jax": {name: str(value) for name, value in jax.config.values.items()},
        "dispatch keys": [str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())],
        "modes": [len(torch.overrides._get_current_function_mode_stack()), torch._C._len_torch_dispatch_stack()],
        "decompositions": {str(op): [f.__module__, f.__qualname__] for op, f in table.items()},
        "lookup": torch._ops.OpOverloadPacket.__getattr__.__qualname__,
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "defaults": [str(torch.get_default_dtype()), torch.get_default_device().type, torch.get_num_threads()],
        "numerics": [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()],
        "filters": len(warnings.filters),
    }

def changed(a, b):
    if not isinstance(a, dict):
        return [a, b]
    return {name: changed(a.get(name), b.get(name)) for name in {*a, *b} if a.get(name) != b.get(name)}

model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.TransformerEncoderLayer(3, 1, 3, batch_first=True))
torch.compile(model, backend="eager")(torch.ones(2, 2, 3))  # what Dynamo itself changes
torch._dynamo.reset()
import torch._decomp.decompositions, torch._refs, torch.accelerator, torch.utils.backend_registration, torch.utils.cpp_extension
before = state()
import pure_backend
imported = state()
compiled = torch.compile(model, backend="assume_pure")
(compiled(torch.ones(2, 2, 3)).sum() + torch.compile(lambda x: torch.rand_like(x) + x.unique().sum(), backend="assume_pure")(
    torch.ones(3)).sum()).backward()
step = pure_backend.TrainStep(model, torch.optim.Adam(model.parameters()), torch.nn.functional.mse_loss)
step(torch.ones(2, 2, 3), torch.zeros(2, 2, 3))
print(json.dumps([changed(before, imported), changed(imported, state())]))
"""


def run(code: str, lines: int = 1) -> list[str]:
    """What a fresh process prints last."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-lines:]


def test_neither_import_nor_compile_changes_global_state():
    assert json.loads(*run(STATE)) == [{}, {}]


AFTERWARDS = """
import torch
import pure_backend
torch.compile(lambda x: x.sin(), backend="assume_pure")(torch.ones(3))
"""

TORCH = """
import tempfile, torch.accelerator, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
dist.barrier()
x = torch.ones(2)
dist.all_reduce(x)
dist.destroy_process_group()
data = TensorDataset(torch.arange(4.0))
print(
    x.tolist(), [[batch[0].tolist() for batch in DataLoader(data, batch_size=2, pin_memory=pin)] for pin in (False, True)],
    torch.get_device_module("cpu") is torch.cpu, torch.accelerator.is_available(), torch.get_device_module() is torch.cpu,
    torch.accelerator.current_accelerator(),
)
"""


def test_torch_works_as_without_a_compile():
    """A barrier asks for the accelerator, a loader that pins memory and `torch.get_device_module` do too."""
    assert run(AFTERWARDS + TORCH) == run("import torch\n" + TORCH)


TORCHAX = """
import torchax
with torchax.default_env():
    shape = tuple(torch.rand(2, device="jax").shape)
print(shape, torchax.__version__ == torchax.VERSION, torch._C._get_privateuse1_backend_name())
"""


LOOKS = """
import sys
for module in list(sys.modules.values()):
    [getattr(module, name, None) for name in ("__warningregistry__", "__x__", "config")]
print(torch._C._get_privateuse1_backend_name(), "torchax" in sys.modules)
"""


def test_torchax_runs_when_a_user_asks_for_it():
    """And not when a tool looks at all modules; afterwards functions compile as before."""
    printed = run(AFTERWARDS + LOOKS + TORCHAX + AFTERWARDS + "print('end')", 3)
    assert printed == ["privateuseone True", "(2,) True jax", "end"]


THREADS = """
import threading
def ask():
    from torchax import default_env
    found.append(default_env() is not None)
found = []
threads = [threading.Thread(target=ask) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print(found, torch._ops.OpOverloadPacket.__getattr__.__qualname__)
"""


def test_threads_may_ask_for_torchax_together():
    assert run(AFTERWARDS + THREADS) == ["[True, True, True, True] OpOverloadPacket.__getattr__"]


BROKEN = """
import sys, pathlib, torch
import importlib.metadata
sys.path.insert(0, {folder!r})
import pure_backend
try:
    torch.compile(lambda x: x.sin(), backend="assume_pure")(torch.ones(3))
except Exception as error:
    while error is not None and not isinstance(error, pure_backend.EnvironmentMismatchError):
        error = error.__cause__
    print(type(error).__name__, "|", type(error.__cause__).__name__, "|", error)
"""


@pytest.mark.parametrize("fault", ["raise AttributeError('no such overload')", "import no_such_module"])
def test_a_torchax_that_does_not_import_is_named(tmp_path, fault):
    package, version = tmp_path / "torchax", "0.0.13"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (package / "ops" / "__init__.py").write_text("")
    (package / "ops" / "jaten.py").write_text(fault + "\n")
    metadata = tmp_path / f"torchax-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchax\nVersion: {version}\n")
    (printed,) = run(BROKEN.format(folder=os.fspath(tmp_path)))
    assert printed.startswith("EnvironmentMismatchError | ")
    assert "pip install" in printed and "cannot be imported" in printed
