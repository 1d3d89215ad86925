"""The device that tensors lie on, not its type: several devices, and several processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pure_backend.errors import DeviceError
from pure_backend.jax_bridge import arrays

ROOT = Path(__file__).parents[2]


def run(script: str, **environment: str) -> subprocess.Popen:
    """A fresh process that runs a script."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PURE_BACKEND_CACHE_DIR": "", "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", script], env=env, cwd=ROOT, **pipes)


def finished(process: subprocess.Popen) -> str:
    """What a process printed; it must have ended well."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]
    return output


SECOND_XLA_DEVICE = """
import copy, torch, torch_xla, pure_backend
from torch import nn

first, second = torch_xla.devices()
compiled = lambda f: torch.compile(f, backend="assume_pure", fullgraph=True)
two = torch.tensor(2.0)

@compiled
def draws(x):
    return x * two + torch.ones(3, device=x.device), torch.rand_like(x), x.sum().cpu()

x = torch.arange(6.0).reshape(2, 3)
for device in (second, first):
    scaled, random, total = draws(x.to(device))
    assert (scaled.device, random.device, total.device.type) == (device, device, "cpu"), (scaled.device, random.device)
    assert torch.equal(scaled.cpu(), x * 2 + 1) and random.cpu().unique().numel() == 6 and total == 15

q = torch.full((2,), 3.0, device=second, requires_grad=True)
compiled(lambda q: (q * q).sum())(q).backward()
assert q.grad.device == second and q.grad.tolist() == [6, 6]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
twin = copy.deepcopy(model).to(second)
step = pure_backend.TrainStep(twin, torch.optim.AdamW(twin.parameters(), lr=0.1), nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(3):
    a, b = torch.randn(5, 4), torch.randn(5, 1)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    got = step(a.to(second), b.to(second))
    torch_xla.sync()
    assert got.device == second
    torch.testing.assert_close(got.cpu(), loss.detach())
assert {value.device for state in step.optimizer.state.values() for value in state.values()} == {second}
dropping = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(second)
step = pure_backend.TrainStep(dropping, torch.optim.SGD(dropping.parameters(), lr=0.1), nn.functional.mse_loss)
assert step(torch.ones(2, 4).to(second), torch.ones(2, 4).to(second)).isfinite()
try:
    draws(x.to(second)) and compiled(lambda a, b: a + b)(x.to(first), x.to(second))
except RuntimeError as error:
    assert "several devices" in str(error) or "xla:1" in str(error), error
else:
    raise AssertionError("tensors of two devices were taken")
print("right on", second)
"""


@pytest.mark.xla
def test_the_second_xla_device():
    pytest.importorskip("torch_xla", reason="about xla tensors")
    assert "right on xla:1" in finished(run(SECOND_XLA_DEVICE, CPU_NUM_DEVICES="2"))


SECOND_PROCESS = """
import torch, jax
port, rank = (PORT, RANK)
jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
import pure_backend
from pure_backend import call_jax, jax_op
import jax.numpy as jnp

x = torch.arange(8.0, requires_grad=True)
y = torch.compile(lambda x: (x * x + torch.rand(8)).sum(), backend="assume_pure")(x)
y.backward()
assert torch.equal(x.grad, 2 * x.detach())
assert torch.equal(call_jax(jnp.cumsum, (x.detach(),)), x.detach().cumsum(0))
model = torch.nn.Linear(8, 1)
step = pure_backend.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
losses = [step(torch.ones(2, 8), torch.zeros(2, 1)).item() for _ in range(2)]
assert losses[1] != losses[0]
print("right in process", rank)
"""


def test_every_process_uses_its_own_devices():
    """`jax.devices()[0]` belongs to the first process once `jax.distributed` is initialized."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    scripts = [SECOND_PROCESS.replace("(PORT, RANK)", f"({port}, {rank})") for rank in range(2)]
    processes = [run(script, XLA_FLAGS=flags) for script in scripts]
    for rank, process in enumerate(processes):
        assert f"right in process {rank}" in finished(process)


def test_a_cuda_device_is_found_by_its_number(monkeypatch):
    seen = [SimpleNamespace(local_hardware_id=1), SimpleNamespace(local_hardware_id=2)]
    monkeypatch.setattr(arrays.jax, "local_devices", lambda backend: seen)
    find = arrays.device_of.__wrapped__
    assert find(torch.device("cuda:1")) is seen[0] and find(torch.device("cuda:2")) is seen[1]
    with pytest.raises(DeviceError, match="JAX does not see cuda:0"):
        find(torch.device("cuda:0"))
