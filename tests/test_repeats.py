"""Layers and functions that a graph has several times are traced once, and loops of them stop compilation from growing."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, compiled, on_lowering
from torch import nn

import pure_backend
from pure_backend.jax_bridge import lowerings

CHOICES = ("auto", "scan", "off")


class Block(nn.Module):
    """A pre-norm layer with what models have: a norm, a gate, dropout, a mask that all layers share."""

    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        y = self.norm(x) * mask
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class Stack(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, depth, block=Block, **kwargs):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(block(**kwargs) for _ in range(depth))

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = (tokens > 0).unsqueeze(-1).to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs)


def tokens():
    return (torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1)),)


@pytest.fixture
def lowered(monkeypatch):
    """How often F.layer_norm is lowered, and the StableHLO of what is."""
    seen = {"layer_norm": 0, "texts": []}
    layer_norm = lowerings.normalization.layer_norm

    def counted(*args, **kwargs):
        seen["layer_norm"] += 1
        return layer_norm(*args, **kwargs)

    for name in ("F.layer_norm", "layer_norm"):
        monkeypatch.setitem(lowerings.registry._LOWERINGS, name, counted)
    on_lowering(monkeypatch, lambda _, found: seen["texts"].append(found.hlo.as_text()))
    pure_backend.clear_caches()
    return seen


def step(f, *args):
    loss = f(*args).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("choice", CHOICES)
def test_values_and_gradients(device, choice):
    agree(seeded(Stack, 5), tokens, device=device, grad=True, options={"repeats": choice})


@pytest.mark.parametrize("remat", ["none", "full", "auto"])
@pytest.mark.parametrize("choice", CHOICES)
def test_with_each_residual_policy(choice, remat):
    agree(seeded(Stack, 4), tokens, grad=True, options={"repeats": choice, "remat": remat})


def test_a_layer_is_traced_once(lowered):
    step(compiled(seeded(Stack, 12)), *tokens())
    assert lowered["layer_norm"] == 1
    forward, backward = lowered["texts"]
    assert len(re.findall(r"call @shared", forward)) == 12
    assert 1 <= len(re.findall(r"func.func private @shared", forward)) <= 2  # one, and one for a last layer that keeps less
    assert len(re.findall(r"func.func private @\w*shared", backward)) <= 4


def test_off_traces_each_layer(lowered):
    step(compiled(seeded(Stack, 12), options={"repeats": "off"}), *tokens())
    assert lowered["layer_norm"] == 12


def test_a_loop_does_not_grow_with_depth(lowered):
    for depth in (4, 12):
        step(compiled(seeded(Stack, depth), options={"repeats": "scan"}), *tokens())
    dots = [text.count("stablehlo.dot_general") for text in lowered["texts"]]
    assert dots[:2] == dots[2:]
    assert "stablehlo.while" in lowered["texts"][0]
    inputs = [text.partition("@main(")[2].partition(" {\n")[0].count("%arg") for text in lowered["texts"]]
    assert inputs[:2] == inputs[2:]  # parameters are stacked before
    assert not any("stablehlo.concatenate" in text for text in lowered["texts"])


def frozen(depth):
    model = seeded(Stack, depth)
    model.layers[1].requires_grad_(False)
    return model


def alternating(depth):
    model = seeded(Stack, 2)
    model.layers = nn.ModuleList([*model.layers] * (depth // 2))
    return model


def crossed(depth):
    model = seeded(Stack, depth)
    for before, layer in zip(model.layers, model.layers[1:], strict=False):
        layer.up, layer.gate = before.gate, before.up
    return model


@pytest.mark.parametrize("make", [frozen, alternating, crossed])
@pytest.mark.parametrize("choice", ["auto", "scan"])
def test_layers_that_share_or_freeze_parameters(device, make, choice):
    agree(make(4), tokens, device=device, grad=True, options={"repeats": choice})


def test_gradients_of_stacked_parameters_are_added_and_changed_in_place():
    model = seeded(Stack, 4)
    eager, f = copy.deepcopy(model), compiled(model, options={"repeats": "scan"})
    for function, m in ((f, model), (eager, eager)):
        for _ in range(2):
            step(function, *tokens())
        nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
        m.layers[0].up.weight.grad.zero_()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_as_many_residuals_as_without():
    pure_backend.clear_caches()
    fresh = {}
    for choice in ("off", "auto"):
        f = compiled(seeded(Stack, 6), options={"repeats": choice})
        step(f, *tokens())
        from pure_backend.jax_bridge.compile import programs

        fresh[choice] = sorted(p.derivative.fresh for p in programs._programs.values() if p.inputs)[-1]
        pure_backend.clear_caches()
    assert fresh["auto"] == fresh["off"]


def test_scopes_are_those_of_each_layer(monkeypatch):
    texts = []
    on_lowering(monkeypatch, lambda _, found: texts.append(found.hlo.compile().as_text()))
    pure_backend.clear_caches()
    step(compiled(seeded(Stack, 3)), *tokens())
    for text in texts:
        names = re.findall(r'op_name="([^"]*)"', text)
        for layer in range(3):
            assert any(f"layers/{layer}" in name and "down" in name for name in names), names


@pytest.mark.parametrize("choice", CHOICES)
def test_running_statistics_of_each_layer(device, choice):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            return x + self.norm(y * 0.5 + y.square()) * y.mean() + y.std()

    net = seeded(nn.Sequential, *(Normed() for _ in range(4)))
    agree(net, lambda: (torch.linspace(-1, 1, 128).reshape(8, 16),), device=device, grad=True, options={"repeats": choice})


@pytest.mark.parametrize("choice", ["auto", "scan"])
def test_each_layer_drops_its_own(choice):
    class Drop(nn.Module):
        def forward(self, x):
            y = F.dropout(x, 0.5)
            return y.abs().sqrt().square().add(1).sub(1).mul(1.0).neg().neg()

    f = compiled(nn.Sequential(*(Drop() for _ in range(4))), options={"repeats": choice})
    torch.manual_seed(0)
    first, second = f(torch.ones(64, 64)), f(torch.ones(64, 64))
    torch.manual_seed(0)
    assert torch.equal(f(torch.ones(64, 64)), first)
    assert not torch.equal(first, second)
    assert 0.03 < (first != 0).float().mean() < 0.1  # a value survives four layers in one case of 16


@pytest.mark.parametrize("choice", CHOICES)
def test_states_of_all_layers_are_returned(device, choice):
    class WithStates(Stack):
        def forward(self, tokens):
            x = self.embed(tokens)
            states = []
            for layer in self.layers:
                x = layer(x, 1.0)
                states.append(x)
            return torch.stack(states), states[1]

    agree(seeded(WithStates, 5), tokens, device=device, grad=True, options={"repeats": choice})


@pytest.mark.parametrize("choice", CHOICES)
def test_what_stands_between_layers_may_differ(choice):
    class Scaled(Stack):
        def forward(self, tokens):
            x = self.embed(tokens)
            for i, layer in enumerate(self.layers):
                x = layer(x, 1.0) * (1 + 0.1 * i)
            return self.head(x)

    agree(seeded(Scaled, 5), tokens, grad=True, options={"repeats": choice})


@pytest.mark.parametrize("choice", CHOICES)
def test_layers_with_bodies_of_their_own(choice):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Stack):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, torch.ones(()), use_reentrant=False)
                x = (x.sin() + x.cos()) * x.tanh() - x.sigmoid()
                x = x + x.square().mean(-1, keepdim=True).sqrt()
            return self.head(x)

    agree(seeded(Checkpointed, 4), tokens, grad=True, options={"repeats": choice})


def test_a_pure_function_called_ten_times_is_traced_once(lowered):
    def normed(x, w):
        y = F.layer_norm(x, (16,), w)
        return torch.tanh(y * 2 + 1) * torch.sigmoid(y) - y.square().mean(-1, keepdim=True)

    def ten_times(function, x, weights):
        for i, w in enumerate(weights.unbind()):
            x = function(x, w) + i
        return x

    x = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(4, 16).requires_grad_()
    weights = torch.linspace(0.5, 1.5, 160, dtype=torch.float64).reshape(10, 16).requires_grad_()
    pure = pure_backend.assume_pure(normed)
    ours = compiled(lambda x, weights: ten_times(pure, x, weights))(x, weights)
    want = ten_times(normed, x, weights)
    torch.testing.assert_close(ours, want)
    for got, grad in zip(*(torch.autograd.grad(y.sum(), [x, weights]) for y in (ours, want)), strict=True):
        torch.testing.assert_close(got, grad)
    assert lowered["layer_norm"] == 1


def test_double_backward():
    net = seeded(Stack, 4).double()
    copied = copy.deepcopy(net)

    def penalty(f, module):
        x = tokens()[0]
        grads = torch.autograd.grad(f(x).square().mean(), list(module.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        return [p.grad for p in module.parameters()]

    for ours, want in zip(penalty(compiled(net), net), penalty(copied, copied), strict=True):
        torch.testing.assert_close(ours, want)


def test_layers_with_host_reads_are_cut():
    def f(x):
        for _ in range(3):
            x = torch.tanh(x * 2 + 1).sin().cos() + x.sigmoid() - x.exp().log()
            x = x + torch.nonzero(x > 0).shape[0]
        return x

    agree(f, lambda: (torch.linspace(-1, 1, 8),))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_training_step_shares_layers_too(lowered, choice):
    ours, twin = seeded(Stack, 5), seeded(Stack, 5)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, twin)]
    step = pure_backend.TrainStep(ours, optimizers[0], F.mse_loss, options={"repeats": choice})
    (x,), target = tokens(), torch.zeros(2, 6, 4)
    for _ in range(3):
        step(x, target)
        optimizers[1].zero_grad()
        F.mse_loss(twin(x), target).backward()
        optimizers[1].step()
    for got, want in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert lowered["layer_norm"] == (5 if choice == "off" else 1)
