"""Strict mode for every test: nothing compiled, cached or counted survives from the test before."""

import importlib.util
import os

import pytest
import torch

import pure_backend
from pure_backend.ir.failures import faults_raised

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PURE_BACKEND_CACHE_DIR"] = ""  # tests count traces: nothing may come from the disk

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
if HAS_XLA:  # before any backward: autograd makes the queues of all devices in its first run
    import torch_xla

    torch_xla.device()

# Dynamo's own, of ordinary user code: a custom `autograd.Function`, an input that is not a leaf.
DYNAMO_WARNINGS = (
    "ignore:.*Function'> should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

DEVICES = ["cpu", pytest.param("xla", marks=pytest.mark.xla)] if HAS_XLA else ["cpu"]


def pytest_configure(config):
    """Let pass the warnings that are neither ours nor the user's to fix."""
    for line in DYNAMO_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def strict():
    """Start from a fresh Dynamo, empty caches, zero counters and a fixed seed; a fault of a pass fails the test."""
    torch._dynamo.reset()
    pure_backend.clear_caches()
    pure_backend.reset_statistics()
    torch.manual_seed(0)
    with faults_raised():
        yield


@pytest.fixture
def as_users_see_it(strict):
    """Let a fault of a pass leave its node to eager, as it does outside of the tests."""
    with faults_raised(False):
        yield


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    """Where the compiled side lives: plain CPU tensors, or `xla` tensors where torch_xla is installed."""
    if request.param == "cpu":
        return torch.device("cpu")
    return torch_xla.device()


@pytest.fixture
def no_tracer_leaks():
    """Let JAX raise where a tracer outlives its trace. Slow: for a few tests only."""
    import jax

    with jax.checking_leaks():
        yield
