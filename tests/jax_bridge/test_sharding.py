"""Sharding annotations stay in programs, forward and backward."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, os
import numpy as np, torch, torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import pure_backend
from pure_backend.jax_bridge.lowerings.sharding import op_sharding

xr.use_spmd()
device, mesh = torch_xla.device(), xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
mark, shape, axes = torch.ops.xla.dynamo_mark_sharding, [2, 2], str(mesh.axis_names)
name = str(mesh)

def with_result(x):
    return mark(x * 2, [0, 1, 2, 3], shape, axes, "('data', 'model')").sin()

def in_place(x):
    y = x * 2
    mark(y, [0, 1, 2, 3], shape, axes, "('data', 'model')")
    return y.sin()

def functional(x):
    return torch.ops.xla.aot_mark_sharding(x * 2, name, "('data', 'model')").sin()

def annotated(tensor):
    lines = torch_xla._XLAC._get_xla_tensors_hlo([tensor]).splitlines()
    return sum('custom_call_target="Sharding", sharding={devices=[2,2]0,1,2,3}' in line for line in lines)

seen = {}
for f in (with_result, in_place, functional):
    torch._dynamo.reset()
    pure_backend.clear_caches()
    pure_backend.reset_statistics()
    x = torch.linspace(0, 1, 16).view(4, 4).to(device).requires_grad_()
    y = torch.compile(f, backend="assume_pure", options={"on_impure": "error"})(x)
    forward = annotated(y)
    (grad,) = torch.autograd.grad(y.sum(), x)
    backward = annotated(grad)
    want = torch.linspace(0, 1, 16).view(4, 4)
    torch.testing.assert_close(y.detach().cpu(), (want * 2).sin())
    torch.testing.assert_close(grad.cpu(), 2 * (want * 2).cos())
    seen[f.__name__] = [forward, backward > 0, pure_backend.statistics().traces]
for spec in [("data", None), (None, "model"), ("model", "data"), (("data", "model"), None), (1, None), (None, None)]:
    t = torch.zeros(8, 8).to(device)
    xs.mark_sharding(t, mesh, spec)
    want = torch_xla._XLAC._get_xla_sharding_spec(t)
    got = op_sharding([0, 1, 2, 3], (2, 2), ("data", "model"), spec)
    assert got == want, (spec, got, want)
print(json.dumps(seen))
"""


@pytest.mark.xla
def test_annotations_are_in_the_hlo_of_forward_and_backward():
    """Under SPMD on four devices, with values and gradients as in eager; the text of a sharding is torch_xla's own."""
    pytest.importorskip("torch_xla")
    env = {**os.environ, "CPU_NUM_DEVICES": "4"}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    seen = json.loads(run.stdout.strip().splitlines()[-1])
    assert seen == {name: [1, True, 1] for name in ("with_result", "in_place", "functional")}
