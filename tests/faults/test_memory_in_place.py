"""Results depend on the values of the inputs at the call, not on what lay at their addresses before."""

import copy

import jaxlib
import pytest
import torch
from oracle import compiled
from steps import sync
from torch import nn

from pure_backend import EnvironmentMismatchError, _compat
from pure_backend.jax_bridge.runtimes.jax import JaxRuntime


def test_gradients_after_parameters_change_in_place(device):
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512, bias=False))
    reference, x = copy.deepcopy(model), torch.randn(2, 128, 512)
    model = model.to(device)
    net = compiled(model)
    for _ in range(3):
        for f, own, given in ((net, model, x.to(device)), (reference, reference, x)):
            own.zero_grad()
            f(given).pow(2).mean().backward()
        sync(device)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-5 * q.grad.abs().max().item(), msg=name)
        with torch.no_grad():
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                update = 0.1 * torch.randn_like(q)
                p += update.to(device)
                q += update


@pytest.mark.parametrize(
    ("version", "kept"),
    [("0.7.2", True), ("0.8.0", True), ("0.8.1", True), ("0.8.2", False), ("0.9.0.dev20251104", False), ("0.10.2", False)],
)
def test_versions_that_keep_products_by_address(version, kept):
    assert _compat.keeps_products_by_address(version) == kept


def test_a_jaxlib_that_keeps_products_by_address_is_refused(monkeypatch):
    monkeypatch.setattr(jaxlib, "__version__", "0.8.1")
    with pytest.raises(EnvironmentMismatchError, match=r"jaxlib 0\.8\.1 .* by address on CPU.* Run: pip install 'jax>=0\.8\.2"):
        JaxRuntime(torch.device("cpu"))
