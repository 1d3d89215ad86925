"""`set_swap_module_params_on_conversion`: `module.to()` exchanges parameters in place, if nothing refers to them weakly."""

import gc

import pytest
import torch
from torch import nn

from pure_backend import call_jax
from pure_backend.jax_bridge.arrays import ArrayViews
from pure_backend.jax_bridge.runtimes import made_runtimes, runtime_for
from tests.oracle import compiled

DYNAMO_REFERS = torch.__version__.startswith("2.9")  # Dynamo's own guards do on torch 2.9, whatever the backend is


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def affine(w, x):
    return x @ w.T


@pytest.mark.parametrize("width", [4, 512])
def test_jax_functions_of_parameters(width, swapping):
    model, x = nn.Linear(width, width, bias=False), torch.randn(3, width)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        for _ in range(2):
            got = call_jax(affine, (model.weight, x.to(dtype)))
            torch.testing.assert_close(got, model(x.to(dtype)), rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                model.weight.mul_(1.5)


@pytest.mark.skipif(DYNAMO_REFERS, reason="Dynamo on torch 2.9 refers to parameters weakly itself")
@pytest.mark.parametrize("width", [4, 512])
def test_compiled_modules(width, swapping):
    model, x = nn.Linear(width, width), torch.randn(3, width)
    fast, weight = compiled(model), model.weight
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        assert model.weight is weight
        got = fast(x.to(dtype))
        torch.testing.assert_close(got, model(x.to(dtype)), rtol=1e-4, atol=1e-5)
        got.sum().backward()
        model.zero_grad()


def test_views_of_parameters_hold_no_memory():
    views = ArrayViews()
    weight = nn.Parameter(torch.ones(512, 512))
    array = views(weight)
    assert views(weight) is array and len(views) == 1
    with torch.no_grad():
        weight.add_(1)
    assert float(array[3, 3]) == 2
    assert views.movable([weight]) == [True]
    del weight
    gc.collect()
    assert len(views) == 0


def test_the_view_of_an_exchanged_parameter_is_made_anew():
    views = ArrayViews()
    one, two = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16, dtype=torch.int32), requires_grad=False)
    views(one), views(two)
    torch.utils.swap_tensors(one, two)
    assert str(views(one).dtype) == "int32" and float(views(two)[0]) == 1
    assert one.dtype is torch.int32 and len(views) == 2


def test_a_parameter_of_a_dead_id_and_another_dtype():
    """The memory lives on, the parameter does not: another tensor may get its id."""
    views = ArrayViews()
    memory = torch.ones(16)
    weight = nn.Parameter(memory.detach())
    views(weight)
    for _ in range(50):
        key = id(weight)
        del weight
        weight = nn.Parameter(memory.view(torch.int32), requires_grad=False)
        if id(weight) == key:
            break
    assert views(weight).dtype == "int32"


def test_models_that_die_leave_no_views():
    runtime = runtime_for(torch.device("cpu"))
    assert runtime in made_runtimes()
    gc.collect()
    before = len(runtime.views)
    for _ in range(3):
        model = nn.Linear(8, 8)
        call_jax(affine, (model.weight, torch.ones(1, 8)))
        del model
    gc.collect()
    assert len(runtime.views) == before
