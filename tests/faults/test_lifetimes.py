"""What a dropped object needed is freed with it, without a reset of Dynamo."""

import gc
import weakref

import pytest
import torch
from oracle import compiled
from torch import nn
from torch._dynamo import eval_frame

import pure_backend
from pure_backend import PureModule, TrainStep, assume_pure, scan_layers
from pure_backend.jax_bridge.compile import programs
from pure_backend.transforms import capture


def held() -> tuple[int, int, int]:
    """Programs, captured functions, and backends that Dynamo keeps."""
    gc.collect()
    assert not any(name.startswith("__compiled_fn") for name in vars(capture))
    return len(programs), len(capture._by_id), len(eval_frame.cached_backends)


def module(i):
    model = nn.Linear(3 + i, 3)
    PureModule(model)(torch.ones(2, 3 + i)).sum().backward()
    return [model]


def training_step(i):
    model = nn.Sequential(nn.Linear(3 + i, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    step = TrainStep(model, optimizer, nn.functional.mse_loss, clip_grad_norm=1.0)
    for rows in (2, 4):
        step(torch.randn(rows, 3 + i), torch.zeros(rows, 3))
    return [model, optimizer, step, model[0].weight]


def function(i):
    fn = eval(f"lambda x: x * {i + 2}")
    assume_pure(fn)(torch.ones(3, requires_grad=True)).sum().backward()
    return [fn]


def layers(i):
    stack = [nn.Linear(3 + i, 3 + i) for _ in range(2)]
    scan_layers(stack, torch.ones(2, 3 + i)).sum().backward()
    return stack


@pytest.mark.parametrize("use", [module, training_step, function, layers], ids=lambda f: f.__name__)
def test_dropped_objects_are_freed(use):
    use(0)
    before = held()
    refs = [weakref.ref(used) for i in range(1, 5) for used in use(i)]
    assert held()[:2] == before[:2]
    assert use is layers or held() == before  # torch 2.13 keeps the empty backend of a layer's capture
    assert [ref() for ref in refs] == [None] * len(refs)
    assert before[0] == 0


def test_a_function_that_is_made_anew_is_not_traced_anew():
    for i in range(4):
        assert assume_pure(lambda x: x + 1)(torch.full((2,), float(i))).tolist() == [i + 1.0] * 2
    assert pure_backend.statistics().traces == 1


def test_a_step_that_is_alive_keeps_its_programs():
    model = nn.Linear(3, 3)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)
    for _ in range(3):
        step(torch.ones(2, 3), torch.zeros(2, 3))
        gc.collect()
    assert pure_backend.statistics().traces == 2  # of the loss and of the update


def test_captures_that_dynamo_gave_up_are_freed():
    """After eight captures of one code object a fresh one takes its place."""

    def scaled(x, name):
        return x * len(name)

    pure = assume_pure(scaled)
    for i in range(20):
        assert pure(torch.ones(2), "x" * i).tolist() == [float(i)] * 2
    assert held()[0] <= 8


def test_a_compiled_module_and_its_program_die_together():
    model = nn.Linear(3, 3)
    c = compiled(model)
    c(torch.ones(2, 3)).sum().backward()
    alive = weakref.ref(model)
    del model, c
    gc.collect()
    assert alive() is None


def test_a_step_dies_while_its_model_lives():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    step = TrainStep(model, optimizer, nn.functional.mse_loss)
    step(torch.ones(2, 3), torch.zeros(2, 3))
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None and len(programs) == 0
    again = TrainStep(model, optimizer, nn.functional.mse_loss)
    assert torch.isfinite(again(torch.ones(2, 3), torch.zeros(2, 3)))


def test_a_reset_frees_captures_that_only_their_own_code_keeps():
    """Dynamo does not survive that a code object is reset while it resets it."""

    class Owner:
        pass

    def own(i):
        owner = Owner()

        def backend(gm, example_inputs):
            def run(*args, owner=owner):
                return gm(*args)

            return run

        owner.captured = capture.Captured(backend=backend)
        assert owner.captured(lambda x: x + i, torch.ones(2)).tolist() == [i + 1.0] * 2

    for i in range(3):
        own(i)
        layers(i)
    torch._dynamo.reset()
    gc.collect()
    assert compiled(lambda x: x + 1)(torch.ones(2)).tolist() == [2.0, 2.0]
