"""`TrainStep`: one program per step, and everything that a caller sees as after the eager loop."""

import copy
import io

import pytest
import torch
from steps import batches, difference, eager_loop, step_loop, sync, twins
from torch import nn

import pure_backend
from pure_backend import TrainStep

mse = nn.functional.mse_loss


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def compared(make, device, steps=5, clip=None, optimizer=torch.optim.AdamW, tolerance=2e-6, **keywords):
    """Both loops over the same batches; the models, optimizers and the step afterwards."""
    eager, other = twins(make, device)
    optimizers = [optimizer(m.parameters(), lr=0.01) for m in (eager, other)]
    data = batches(steps, (6, 5), (6, 3))
    step = TrainStep(other, optimizers[1], mse, clip_grad_norm=clip, **keywords)
    want, got = eager_loop(eager, optimizers[0], data, clip=clip), step_loop(step, data, device)
    torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=1e-4, atol=1e-5)
    assert difference(eager.state_dict(), other.state_dict()) < tolerance
    assert difference(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"]) < tolerance
    return eager, other, optimizers, step


def test_one_program_one_call_no_copies(device):
    _, other, _, step = compared(mlp, device)
    counted = pure_backend.statistics()
    assert (counted.lowerings, counted.calls, counted.traces) == (1, 5, 2)
    assert step.bytes_copied == 0
    assert all(parameter.grad is None for parameter in other.parameters())


@pytest.mark.xla
def test_aliased_on_xla():
    """Parameters and states keep their buffers: torch_xla counts the results that lie in an argument's memory."""
    torch_xla = pytest.importorskip("torch_xla")
    from torch_xla.debug import metrics

    device = torch_xla.device()
    net = mlp().to(device)
    step = TrainStep(net, torch.optim.Adam(net.parameters()), mse)
    x, y = (t.to(device) for t in batches(1, (6, 5), (6, 3))[0])
    for _ in range(2):
        step(x, y)
        torch_xla.sync(wait=True)
    metrics.clear_all()
    step(torch.randn(7, 5, device=device), torch.randn(7, 3, device=device))  # another shape: compiled, and so counted, now
    torch_xla.sync(wait=True)
    found = metrics.metric_data("InputOutputAliasCount")
    assert found is not None and found[1] == 4 + 3 * 4, "4 parameters with 3 states each"


@pytest.mark.xla
def test_no_step_waits_on_xla():
    """Counters that eager keeps on the CPU lie on the device, so that nothing is read there."""
    torch_xla = pytest.importorskip("torch_xla")
    from torch_xla.debug import metrics

    device = torch_xla.device()
    net = mlp().to(device)
    optimizer = torch.optim.Adam(net.parameters())
    step = TrainStep(net, optimizer, mse)
    x, y = (t.to(device) for t in batches(1, (6, 5), (6, 3))[0])
    for _ in range(2):
        step(x, y)
        torch_xla.sync(wait=True)
    assert {state["step"].device.type for state in optimizer.state.values()} == {"xla"}
    metrics.clear_all()
    step(x, y)
    assert not metrics.metric_data("ExecuteTime") and not metrics.metric_data("TransferFromDeviceTime")


class Normalized(nn.Module):
    """BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def test_batch_norm_writes_its_statistics(device):
    def make():
        model = Normalized()
        model.drop.p = 0.0
        return model

    _, other, _, _ = compared(make, device, optimizer=torch.optim.SGD)
    assert other.norm.num_batches_tracked.item() == 5


def test_dropout_follows_the_seed_and_the_mode(device):
    def losses(seed, training=True):
        _, model = twins(Normalized, device)
        model.train(training)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), mse)
        data = batches(1, (64, 5), (64, 3)) * 2
        torch.manual_seed(seed)
        return torch.stack(step_loop(step, data, device)).tolist()

    first, again, other = losses(1), losses(1), losses(2)
    assert first == again and first != other and first[0] != first[1]
    still = losses(1, training=False)
    assert still[0] == still[1]


class Tied(nn.Module):
    """An embedding that is the output's weight too, and a part that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.unused = nn.Linear(2, 2)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens).tanh())


def test_tied_frozen_and_unreached_parameters_in_groups(device):
    def make():
        model = nn.ModuleDict({"tied": Tied(), "head": nn.Linear(7, 7), "frozen": nn.Linear(7, 7)})
        model["frozen"].requires_grad_(False)
        return model

    def loss_of(model, tokens, targets):
        hidden = model["frozen"](model["head"](model["tied"](tokens)))
        return nn.functional.cross_entropy(hidden, targets)

    eager, other = twins(make, device)
    if device.type == "xla":
        other["tied"].out.weight = other["tied"].embed.weight  # `Module.to` unties on xla
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": list(m["tied"].parameters()), "weight_decay": 0.5},
                {"params": [*m["head"].parameters(), *m["frozen"].parameters()], "lr": 0.1},
            ],
            lr=0.01,
        )
        for m in (eager, other)
    ]
    step = TrainStep(other, optimizers[1], loss_of)
    torch.manual_seed(0)
    for _ in range(4):
        tokens, targets = torch.randint(0, 7, (6,)), torch.randint(0, 7, (6,))
        optimizers[0].zero_grad()
        loss_of(eager, tokens, targets).backward()
        optimizers[0].step()
        step(tokens.to(device), targets.to(device))
        sync(device)
    assert difference(eager.state_dict(), other.state_dict()) < 2e-6
    assert difference(optimizers[0].state_dict(), optimizers[1].state_dict()) < 2e-6
    assert other["tied"].out.weight is other["tied"].embed.weight


def test_autocast(device):
    eager, other = twins(mlp, device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, other)]
    step = TrainStep(other, optimizers[1], mse)
    for x, y in batches(3, (6, 5), (6, 3)):
        optimizers[0].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse(eager(x), y)
        loss.backward()
        optimizers[0].step()
        with torch.autocast(device.type, torch.bfloat16):
            got = step(x.to(device), y.to(device))
        sync(device)
        torch.testing.assert_close(got.cpu(), loss.detach(), rtol=2e-2, atol=2e-2)
    assert 0 < difference(eager.state_dict(), other.state_dict()) < 5e-3
    assert pure_backend.statistics().lowerings == 1


def test_accumulation_is_the_loop_over_micro_batches(device):
    eager, other = twins(Normalized, device)
    eager.drop.p = other.drop.p = 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (eager, other)]
    step = TrainStep(other, optimizers[1], mse, grad_accumulation=3, clip_grad_norm=0.5)
    for x, y in batches(4, (12, 5), (12, 3)):
        optimizers[0].zero_grad()
        total = torch.zeros(())
        for inputs, targets in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = mse(eager(inputs), targets) / 3
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        optimizers[0].step()
        torch.testing.assert_close(step(x.to(device), y.to(device)).cpu(), total, rtol=1e-5, atol=1e-5)
        sync(device)
    assert difference(eager.state_dict(), other.state_dict()) < 2e-5
    assert pure_backend.statistics().lowerings == 1
    with pytest.raises(ValueError, match=r"\(7, 5\) cannot be split into grad_accumulation=3"):
        step(torch.zeros(7, 5, device=device), torch.zeros(7, 3, device=device))


def test_accumulated_micro_batches_draw_other_numbers():
    model = Normalized()
    model.norm = nn.Identity()

    def loss_of(model, x):
        out = model(x)
        return out.mean(), out

    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_of, grad_accumulation=2, has_aux=True)
    _, out = step(torch.ones(8, 5))
    assert out.shape == (2, 4, 3) and not torch.equal(out[0], out[1])


@pytest.mark.parametrize("norm", [0.05, 100.0])
def test_clipping(device, norm):
    compared(mlp, device, clip=norm, optimizer=torch.optim.SGD)


def test_clipping_counts_parameters_that_are_not_the_optimizers(device):
    eager, other = twins(mlp, device)
    optimizers = [torch.optim.SGD(m[2].parameters(), lr=0.1) for m in (eager, other)]
    data = batches(3, (6, 5), (6, 3))
    for x, y in data:
        eager.zero_grad()
        mse(eager(x), y).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        optimizers[0].step()
    step_loop(TrainStep(other, optimizers[1], mse, clip_grad_norm=0.1), data, device)
    assert difference(eager.state_dict(), other.state_dict()) < 2e-6


def test_aux(device):
    def loss_of(model, batch, scale):
        out = model(batch["x"])
        return mse(out, batch["y"]) * scale, {"out": out, "name": "aux", "x": batch["x"]}

    eager, other = twins(mlp, device)
    x, y = batches(1, (6, 5), (6, 3))[0]
    batch = {"x": x.to(device), "y": y.to(device)}
    step = TrainStep(other, torch.optim.SGD(other.parameters(), lr=0.1), loss_of, has_aux=True)
    loss, aux = step(batch, scale=2.0)
    want = eager(x)
    torch.testing.assert_close(loss.cpu(), 2 * mse(want, y).detach())
    torch.testing.assert_close(aux["out"].cpu(), want.detach())
    assert aux["name"] == "aux" and aux["x"] is batch["x"] and not aux["out"].requires_grad and not loss.requires_grad


def test_the_model_may_return_the_loss(device):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x, labels):
            return mse(self.linear(x), labels)

    eager, other = twins(WithLoss, device)
    x, y = batches(1, (6, 5), (6, 3))[0]
    step = TrainStep(other, torch.optim.SGD(other.parameters(), lr=0.1))
    torch.testing.assert_close(step(x=x.to(device), labels=y.to(device)).cpu(), eager(x, y).detach())


def test_checkpoints_go_into_an_eager_loop_and_back(device):
    """Eager, a checkpoint, `TrainStep`, a checkpoint, eager: as if it had been eager throughout."""
    eager, other = twins(mlp, device)
    make = lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)  # noqa: E731
    optimizers = make(eager), make(other)
    data = batches(9, (6, 5), (6, 3))
    eager_loop(eager, optimizers[0], data)

    first = copy.deepcopy(eager)
    torch.manual_seed(0)
    first.load_state_dict(mlp().state_dict())
    first_optimizer = make(first)
    eager_loop(first, first_optimizer, data[:3])
    other.load_state_dict(_saved(first.state_dict()))
    optimizers[1].load_state_dict(_saved(first_optimizer.state_dict()))
    step_loop(TrainStep(other, optimizers[1], mse), data[3:6], device)
    last = mlp()
    last.load_state_dict(_saved(other.state_dict()))
    last_optimizer = make(last)
    last_optimizer.load_state_dict(_saved(optimizers[1].state_dict()))
    eager_loop(last, last_optimizer, data[6:])
    assert difference(eager.state_dict(), last.state_dict()) < 2e-6
    assert difference(optimizers[0].state_dict(), last_optimizer.state_dict()) < 2e-6


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


def test_loading_between_steps_is_seen(device):
    eager, other = twins(mlp, device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (eager, other)]
    step = TrainStep(other, optimizers[1], mse)
    data = batches(4, (6, 5), (6, 3))
    eager_loop(eager, optimizers[0], data[:2])
    step_loop(step, data[:2], device)
    kept = [copy.deepcopy(o.state_dict()) for o in optimizers]
    eager_loop(eager, optimizers[0], data[2:])
    step_loop(step, data[2:], device)
    for optimizer, state in zip(optimizers, kept, strict=True):
        optimizer.load_state_dict(state)
    eager_loop(eager, optimizers[0], data)
    step_loop(step, data, device)
    assert difference(eager.state_dict(), other.state_dict()) < 2e-6
    assert pure_backend.statistics().lowerings == 1


def test_hooks_between_steps_see_new_values(device):
    """An average kept beside the model, and a scheduler, which else warns that no step came before it."""
    eager, other = twins(mlp, device)
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in (eager, other)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, other)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 0.01) for o in optimizers]
    called = []
    optimizers[1].register_step_post_hook(lambda *_: called.append(1))

    def after(i):
        averages[i].update_parameters((eager, other)[i])
        schedulers[i].step()

    data = batches(4, (6, 5), (6, 3))
    eager_loop(eager, optimizers[0], data, after=lambda: after(0))
    step_loop(TrainStep(other, optimizers[1], mse), data, device, after=lambda: after(1))
    assert difference(averages[0].state_dict(), averages[1].state_dict()) < 2e-6
    assert len(called) == 4


def test_memory_that_others_show_is_written_in_place():
    net = mlp()
    view, whole = net[0].weight.detach()[1:], sum(p.nbytes for p in net.parameters())
    own = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), mse)
    x, y = batches(1, (6, 5), (6, 3))[0]
    for _ in range(3):  # in the first step what was captured may still show more of them
        own(x, y)
        assert torch.equal(view, net[0].weight.detach()[1:])
    assert own.bytes_copied == net[0].weight.nbytes
    pointers = [p.data_ptr() for p in net.parameters()]
    in_place = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), mse, donate=False)
    in_place(x, y)
    assert [p.data_ptr() for p in net.parameters()] == pointers and in_place.bytes_copied == whole


def test_a_failure_leaves_everything(device):
    eager, other = twins(Normalized, device)
    optimizer = torch.optim.Adam(other.parameters())
    step = TrainStep(other, optimizer, mse, check_finite=True)
    x, y = (t.to(device) for t in batches(1, (6, 5), (6, 3))[0])
    bad = x.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="nothing was updated"):
        step(bad, y)
    assert difference(eager.state_dict(), other.state_dict()) == 0 and not optimizer.state
    step(x, y)
    sync(device)
    before = copy.deepcopy(({k: v.cpu() for k, v in other.state_dict().items()}, _saved(optimizer.state_dict())))
    with pytest.raises(FloatingPointError):
        step(bad, y)
    with pytest.raises(Exception, match=r"shape|size|dimension"):
        step(x[:, :4], y)
    sync(device)
    assert difference(before[0], other.state_dict()) == 0
    assert difference(before[1]["state"], optimizer.state_dict()["state"]) == 0
    step(x, y)
    assert pure_backend.statistics().lowerings == 1


def test_an_interrupt_waits_for_the_new_values(monkeypatch):
    from pure_backend.jax_bridge.runtimes.jax import JaxRuntime

    eager, other = twins(mlp, torch.device("cpu"))
    assign, calls = JaxRuntime.assign, []

    def interrupted(self, tensors, handles, move):
        calls.append(1)
        if len(calls) == 1:
            assign(self, tensors[:2], handles[:2], move[:2])
            raise KeyboardInterrupt
        return assign(self, tensors, handles, move)

    monkeypatch.setattr(JaxRuntime, "assign", interrupted)
    data = batches(1, (6, 5), (6, 3))
    optimizers = [torch.optim.Adam(m.parameters()) for m in (eager, other)]
    with pytest.raises(KeyboardInterrupt):
        step_loop(TrainStep(other, optimizers[1], mse), data, torch.device("cpu"))
    eager_loop(eager, optimizers[0], data)
    assert difference(eager.state_dict(), other.state_dict()) < 2e-6
    assert difference(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"]) < 2e-6


def test_stale_gradients_are_dropped(device):
    eager, other = twins(mlp, device)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, other)]
    data = batches(1, (6, 5), (6, 3))
    eager_loop(eager, optimizers[0], data)
    step_loop(TrainStep(other, optimizers[1], mse), data, device)
    assert difference(eager.state_dict(), other.state_dict()) < 2e-6
    assert all(parameter.grad is None for parameter in other.parameters())


def test_complex_and_bfloat16_parameters():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wave = nn.Parameter(torch.randn(5, dtype=torch.complex64))
            self.small = nn.Parameter(torch.randn(5).bfloat16())

        def forward(self, x):
            return (x * self.wave).abs() * self.small

    eager, other = twins(Mixed, torch.device("cpu"))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (eager, other)]
    data = batches(5, (6, 5), (6, 5))
    eager_loop(eager, optimizers[0], data)
    step_loop(TrainStep(other, optimizers[1], mse), data, torch.device("cpu"))
    torch.testing.assert_close(other.wave, eager.wave, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.small, eager.small, rtol=2e-2, atol=2e-2)


def test_a_tensor_as_learning_rate(device):
    eager, other = twins(mlp, device)
    rates = torch.tensor(0.01), torch.tensor(0.01, device=device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in zip((eager, other), rates, strict=True)]

    def halve(i):
        rates[i].mul_(0.5)

    data = batches(4, (6, 5), (6, 3))
    eager_loop(eager, optimizers[0], data, after=lambda: halve(0))
    step_loop(TrainStep(other, optimizers[1], mse), data, device, after=lambda: halve(1))
    assert difference(eager.state_dict(), other.state_dict()) < 2e-6
    assert pure_backend.statistics().lowerings == 1


def test_a_changed_model_or_shape_is_noticed():
    net = Normalized()
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), mse)
    x, y = batches(1, (6, 5), (6, 3))[0]
    step(x, y)
    before = net.norm.running_mean.clone()
    net.eval()
    step(x, y)
    assert torch.equal(before, net.norm.running_mean)
    step(x[:4], y[:4])
    net.last.weight.requires_grad_(False)
    kept = net.last.weight.clone()
    step(x, y)
    assert torch.equal(kept, net.last.weight) and pure_backend.statistics().lowerings == 4


def test_equal_models_share_a_program():
    for _ in range(2):
        net = mlp()
        TrainStep(net, torch.optim.Adam(net.parameters()), mse)(torch.ones(6, 5), torch.ones(6, 3))
        kept = net, pure_backend.statistics()
    del kept
    assert pure_backend.statistics().lowerings <= 2


def prints(model, x):
    loss = model(x).mean()
    if loss.item() > 100:
        return loss * 2
    return loss


def test_an_impure_loss_is_named():
    net = mlp()
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), prints)
    with pytest.raises(pure_backend.PureBackendError, match=r"(?s)cannot be one program.*test_train_step\.py"):
        step(torch.ones(6, 5))
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda model, x: torch.unique(model(x)).sum())
    with pytest.raises(pure_backend.PureBackendError, match="unique"):
        step(torch.ones(6, 5))


def test_a_loss_must_be_one_number_of_the_parameters():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"one real number.*\(6, 3\)"):
        TrainStep(net, optimizer, lambda model, x: model(x))(torch.ones(6, 5))
    with pytest.raises(ValueError, match="depends on the parameters"):
        TrainStep(net, optimizer, lambda model, x: model(x).detach().mean())(torch.ones(6, 5))


def test_refusals():
    net, scaler = mlp(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"GradScaler.*bfloat16"):
        TrainStep(net, optimizer, lambda model, x: scaler.scale(model(x).mean()))
    with pytest.raises(TypeError, match="GradScaler"):
        TrainStep(net, scaler, mse)
    with pytest.raises(ValueError, match=r"group 0 of SGD has parameters that are not the model's.*\(8, 5\)"):
        TrainStep(mlp(), optimizer, mse)
    with pytest.raises(TypeError, match="'0' gives sparse gradients"):
        TrainStep(nn.Sequential(nn.Embedding(3, 3, sparse=True)), optimizer, mse)
    with pytest.raises(ValueError, match="grad_accumulation"):
        TrainStep(net, optimizer, mse, grad_accumulation=0)
    with pytest.raises(ValueError, match="'verify'"):
        TrainStep(net, optimizer, mse, options={"verify": True})
    step = TrainStep(net, optimizer, mse)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(TypeError, match="pre-hook"):
        step(torch.ones(6, 5), torch.ones(6, 3))
    handle.remove()
    net[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(TypeError, match=r"'0\.weight' has a gradient hook"):
        TrainStep(net, optimizer, mse)
