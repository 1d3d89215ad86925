"""Recurrent layers as programs."""

import copy
import logging

import pytest
import torch
from oracle import agree
from steps import batches, difference, eager_loop, step_loop, twins
from torch import nn

import pure_backend
from pure_backend import PureModule, TrainStep, assume_pure
from pure_backend.backend import assume_pure as compile_graph

GRU = getattr(nn.GRU, "_orig", nn.GRU)  # torch_xla puts another class in its place, which takes xla tensors only


@pytest.fixture
def allow_rnn():
    """What a user of `torch.compile` sets."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


ARRANGEMENTS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm, all": lambda: nn.LSTM(3, 5, 2, bidirectional=True, batch_first=True, proj_size=2),
    "lstm, no biases": lambda: nn.LSTM(3, 4, 2, bias=False),
    "lstm, projected": lambda: nn.LSTM(3, 4, bias=False, proj_size=3),
    "gru": lambda: GRU(3, 4),
    "gru, all": lambda: GRU(3, 4, 2, bidirectional=True, batch_first=True, bias=False),
    "tanh": lambda: nn.RNN(3, 4, 2, bidirectional=True),
    "relu": lambda: nn.RNN(3, 4, 2, nonlinearity="relu", batch_first=True),
}


def states(layer: nn.RNNBase, batch: tuple[int, ...]):
    """Initial states for a batch."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    hidden = torch.randn(count, *batch, layer.proj_size or layer.hidden_size, requires_grad=True)
    if not isinstance(layer, nn.LSTM):
        return hidden
    return hidden, torch.randn(count, *batch, layer.hidden_size, requires_grad=True)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_arrangements(name, given, allow_rnn):
    layer = ARRANGEMENTS[name]()

    def make_args():
        torch.manual_seed(3)
        x = torch.randn(5, 2, 3, requires_grad=True)
        return (x, states(layer, (5 if layer.batch_first else 2,))) if given else (x,)

    agree(layer, make_args, grad=True, pure=True, fullgraph=True)
    assert pure_backend.statistics().traces == 1


@pytest.mark.parametrize("make", [nn.LSTM, GRU], ids=lambda make: make.__name__)
def test_one_sequence_without_a_batch(make, allow_rnn):
    layer = make(3, 4)

    def make_args():
        torch.manual_seed(3)
        return torch.randn(5, 3, requires_grad=True), states(layer, ())

    agree(layer, make_args, grad=True, pure=True, fullgraph=True)


@pytest.mark.xla
def test_the_layer_that_torch_xla_puts_in_place_of_torchs():
    torch_xla = pytest.importorskip("torch_xla", reason="about xla tensors")
    model, other = twins(lambda: nn.ModuleList([GRU(3, 4), nn.Linear(4, 1)]), torch_xla.device())
    other[0].__class__ = nn.GRU
    forward = lambda model, x, y: nn.functional.mse_loss(model[1](model[0](x)[0]), y)  # noqa: E731
    step = TrainStep(other, torch.optim.SGD(other.parameters(), lr=0.1), forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(3, (5, 2, 3), (5, 2, 1)):
        optimizer.zero_grad()
        loss = forward(model, x, y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x.to(torch_xla.device()), y.to(torch_xla.device())).cpu(), loss.detach())
    assert pure_backend.statistics().traces == 2  # the loss and the update


@pytest.mark.xla
@pytest.mark.parametrize("make", [nn.LSTM, GRU], ids=lambda make: make.__name__)
def test_on_xla_tensors(make, allow_rnn):
    torch_xla = pytest.importorskip("torch_xla", reason="about xla tensors")

    def make_args():
        return (torch.linspace(-1, 1, 30).reshape(5, 2, 3).requires_grad_(),)

    agree(make(3, 4, bidirectional=True), make_args, device=torch_xla.device(), grad=True, pure=True, fullgraph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, allow_rnn):
    def make_args():
        return (torch.linspace(-1, 1, 30, dtype=dtype).reshape(5, 2, 3),)

    agree(GRU(3, 4).to(dtype), make_args, pure=True, fullgraph=True, tol=2e-2 if dtype is torch.bfloat16 else 1e-12)


def test_autocast(allow_rnn):
    layer = nn.LSTM(3, 4)

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            output, (hidden, cell) = layer(x)
        return output, hidden, cell

    agree(f, lambda: (torch.linspace(-1, 1, 30).reshape(5, 2, 3),), pure=True, fullgraph=True, tol=2e-2)


def test_at_size_with_parameters_that_change_in_place(allow_rnn):
    torch.manual_seed(0)
    layer, head = nn.LSTM(512, 512, batch_first=True), nn.Linear(512, 512)
    model = nn.ModuleList([layer, head])
    twin = copy.deepcopy(model)
    call = torch.compile(lambda x: head(layer(x)[0]), backend="assume_pure", fullgraph=True)
    eager = lambda x: twin[1](twin[0](x)[0])  # noqa: E731
    for _ in range(3):
        x = torch.randn(1, 128, 512)
        for f, own in ((call, model), (eager, twin)):
            own.zero_grad()
            f(x).pow(2).mean().backward()
        for got, want in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-3 * want.grad.abs().max().item())
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                change = 0.05 * torch.randn_like(p)
                p += change
                q += change
    assert pure_backend.statistics().traces == 1
    assert pure_backend.statistics().lowerings == 2


def test_dropout_between_layers(allow_rnn):
    """Other numbers at every call, equal ones for equal seeds, and none in eval mode."""
    layer = nn.LSTM(3, 64, 2, dropout=0.5)
    call, x = torch.compile(layer, backend="assume_pure", fullgraph=True), torch.randn(5, 2, 3)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(call(x)[0].detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    layer.eval()
    torch.testing.assert_close(call(x)[0], layer(x)[0])


def test_the_product_with_the_input_is_outside_of_the_loop(allow_rnn):
    text = str(pure_backend.explain(nn.LSTM(3, 4))(torch.randn(5, 2, 3)).hlo(0, stage="jaxpr"))
    assert text.count(" scan[") == 1
    assert text.count("dot_general[") == 2  # one of all steps, one in the step


class LanguageModel(nn.Module):
    """Words to words."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.LSTM(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, words):
        return self.head(self.layers(self.embedding(words))[0]).flatten(0, 1)


def loss(scores, words):
    """Cross entropy of all words."""
    return nn.functional.cross_entropy(scores, words.flatten())


def test_training_a_language_model(device):
    model, other = twins(LanguageModel, device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other)]
    torch.manual_seed(3)
    data = [(words[:, :-1], words[:, 1:].contiguous()) for words in torch.randint(0, 11, (10, 4, 13))]
    want = eager_loop(model, optimizers[0], data, loss)
    got = step_loop(TrainStep(other, optimizers[1], loss), data, device)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert difference(model.state_dict(), other.state_dict()) < 1e-4
    assert not torch._dynamo.config.allow_rnn


def test_a_compiled_language_model(allow_rnn):
    torch.manual_seed(0)
    agree(LanguageModel(), lambda: (torch.arange(12).reshape(3, 4) % 11,), grad=True, pure=True, fullgraph=True)
    assert pure_backend.statistics().traces == 1
    assert pure_backend.statistics().lowerings == 2


def test_the_transforms_set_what_dynamo_needs_while_they_capture():
    layer, (x,) = GRU(3, 4), batches(1, (5, 2, 3))[0]
    want = layer(x)[0]
    torch.testing.assert_close(PureModule(layer)(x)[0], want)
    torch.testing.assert_close(assume_pure(lambda x: layer(x)[0])(x), want)
    assert pure_backend.statistics().calls == 2
    assert not torch._dynamo.config.allow_rnn


def test_a_packed_sequence_runs_in_eager(allow_rnn, caplog):
    layer = nn.LSTM(3, 4)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])
    got = torch.compile(layer, backend="assume_pure")(packed)
    torch.testing.assert_close(got[0].data, layer(packed)[0].data)

    def direct(data, sizes, hidden, cell, *weights):
        return torch.lstm(data, sizes, (hidden, cell), list(weights), True, 1, 0.0, False, False)

    zeros = torch.zeros(1, 2, 4)
    args = (packed.data, packed.batch_sizes, zeros, zeros, *layer.parameters())
    graph = torch.fx.symbolic_trace(lambda d, s, h, c, w, u, b, v: direct(d, s, h, c, w, u, b, v))
    with caplog.at_level(logging.WARNING, "pure_backend"):
        got = compile_graph(graph, args)(*args)
    torch.testing.assert_close(got[0], layer(packed)[0].data)
    assert "lstm" in caplog.text
