"""Every optimizer of torch in one program: as eager after 20 steps, lowered once while the learning rate changes."""

import pytest
import torch
from steps import batches, difference, eager_loop, step_loop, twins
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

import pure_backend
from pure_backend import TrainStep

STEPS = 20
LR = {"lr": 0.01}
CASES = [
    ("SGD", LR),
    ("SGD", LR | {"momentum": 0.9}),
    ("SGD", LR | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", LR | {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", LR),
    ("AdamW", LR | {"maximize": True, "foreach": True}),
    ("Adamax", LR | {"weight_decay": 0.1}),
    ("NAdam", LR | {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", LR | {"weight_decay": 0.1}),
    ("Adagrad", LR | {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("RMSprop", LR | {"momentum": 0.9, "centered": True}),
    ("Rprop", LR),
    ("ASGD", LR | {"t0": 10.0}),
    ("Adafactor", LR | {"weight_decay": 0.1}),
    ("Muon", LR),
]
TOLERANCE = {"Muon": 5e-3}  # orthogonalized in bfloat16, whose products are not rounded alike


def model(bias=True):
    return nn.Sequential(nn.Linear(5, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3, bias=bias))


def compare(name, keywords, device, tolerance, bias=True):
    eager, other = twins(lambda: model(bias), device)
    optimizers = [getattr(torch.optim, name)(m.parameters(), **keywords) for m in (eager, other)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.97) for o in optimizers]
    data = batches(STEPS, (6, 5), (6, 3))
    want = eager_loop(eager, optimizers[0], data, after=schedulers[0].step)
    got = step_loop(TrainStep(other, optimizers[1], nn.functional.mse_loss), data, device, after=schedulers[1].step)
    torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=10 * tolerance, atol=10 * tolerance)
    assert difference(eager.state_dict(), other.state_dict()) < tolerance
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert difference(states[0]["state"], states[1]["state"]) < 50 * tolerance


@pytest.mark.parametrize(("name", "keywords"), CASES, ids=lambda case: case if isinstance(case, str) else "-".join(case))
def test_as_eager_after_20_steps(device, name, keywords):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    compare(name, keywords, device, TOLERANCE.get(name, 2e-6), bias=name != "Muon")
    assert (pure_backend.statistics().lowerings, pure_backend.statistics().calls) == (1, STEPS)


def test_a_first_gradient_as_state_takes_a_program_of_its_own(device):
    """With dampening SGD's first step is another one than those after it."""
    compare("SGD", LR | {"momentum": 0.9, "dampening": 0.5}, device, 2e-6)
    assert pure_backend.statistics().lowerings == 2


REFUSED = {"LBFGS": "closure", "SparseAdam": "sparse"}
CONFIGURATIONS = [
    pytest.param(info.optim_cls, config, id=f"{info.optim_cls.__name__}-{config.desc}")
    for info in optim_db
    for config in info.optim_inputs_func("cpu")
    if info.optim_cls.__name__ not in REFUSED
]


@pytest.mark.parametrize(("optimizer", "config"), CONFIGURATIONS)
def test_configurations_of_optim_db(optimizer, config):
    """All that torch tests its own optimizers with, for a few steps."""
    if config.kwargs.get("differentiable"):
        pytest.skip("refused: a step has no gradient")
    eager, other = twins(lambda: model(optimizer.__name__ != "Muon"), torch.device("cpu"))
    make = [optimizer(m.parameters(), **config.kwargs) for m in (eager, other)]
    data = batches(3, (6, 5), (6, 3))
    eager_loop(eager, make[0], data)
    step_loop(TrainStep(other, make[1], nn.functional.mse_loss), data, torch.device("cpu"))
    assert difference(eager.state_dict(), other.state_dict()) < TOLERANCE.get(optimizer.__name__, 2e-6)
    assert difference(make[0].state_dict()["state"], make[1].state_dict()["state"]) < 1e-4


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    net = model()
    with pytest.raises(TypeError, match=f"{name}.*{REFUSED[name]}"):
        TrainStep(net, getattr(torch.optim, name)(net.parameters()), nn.functional.mse_loss)


def test_a_number_that_decides_is_noticed(device):
    """`weight_decay` from nothing to something is another graph, from something to something else is not."""
    eager, other = twins(model, device)
    optimizers = [torch.optim.Adam(m.parameters(), weight_decay=0.0) for m in (eager, other)]
    step = TrainStep(other, optimizers[1], nn.functional.mse_loss)
    lowerings = []
    for decay in (0.0, 0.1, 0.2, 0.0):
        for optimizer in optimizers:
            optimizer.param_groups[0]["weight_decay"] = decay
        data = batches(2, (6, 5), (6, 3))
        eager_loop(eager, optimizers[0], data)
        step_loop(step, data, device)
        lowerings.append(pure_backend.statistics().lowerings)
    assert difference(eager.state_dict(), other.state_dict()) < 2e-6
    assert lowerings == [1, 2, 2, 2]


class Counting(torch.optim.Optimizer):
    """Keeps a Python number in its state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    p.sub_(p.grad * (group["lr"] / state["count"]))


class Printing(Counting):
    """Reads a value on the host."""

    def step(self):
        if self.param_groups[0]["params"][0].sum() > 0:
            print("positive")


class Averaging(Counting):
    """One of a user's own, with a state that it makes at the first step."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = state["mean"] * 0.9 + p.grad if "mean" in state else p.grad.clone()
                with torch.no_grad():
                    p.sub_(state["mean"] * group["lr"])


def test_optimizers_of_users():
    device = torch.device("cpu")
    for cls, said in (
        (Counting, "Counting counts 'count'.*make it a tensor"),
        (Printing, "step of Printing cannot be captured"),
    ):
        net = model()
        with pytest.raises(pure_backend.PureBackendError, match=said):
            TrainStep(net, cls(net.parameters()), nn.functional.mse_loss)(*batches(1, (6, 5), (6, 3))[0])
    eager, other = twins(model, device)
    optimizers = [Averaging(m.parameters()) for m in (eager, other)]
    data = batches(4, (6, 5), (6, 3))
    eager_loop(eager, optimizers[0], data)
    step_loop(TrainStep(other, optimizers[1], nn.functional.mse_loss), data, device)
    assert difference(eager.state_dict(), other.state_dict()) < 2e-6
    assert difference(optimizers[0].state_dict(), optimizers[1].state_dict()) < 2e-6
