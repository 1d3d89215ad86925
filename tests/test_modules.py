"""Modules: statistics of normalisation layers, tied weights, attributes, buffers that change between calls."""

import copy

import pytest
import torch
from oracle import agree, compiled
from torch import nn

import pure_backend


def wave(*shape) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return (torch.arange(float(n)).reshape(shape) * 0.7).sin()


EAGER_ON_XLA = "Dynamo leaves momentum=None to eager (a host read), and torch_xla's eager keeps the biased variance"

NORMS = {
    "batch 1d": (nn.BatchNorm1d(3), (4, 3)),
    "batch 1d, sequence": (nn.BatchNorm1d(3), (4, 3, 5)),
    "batch 2d": (nn.BatchNorm2d(3, momentum=0.3), (2, 3, 4, 4)),
    "batch 3d": (nn.BatchNorm3d(2), (2, 2, 2, 3, 2)),
    "cumulative": (nn.BatchNorm1d(3, momentum=None), (4, 3)),
    "no statistics": (nn.BatchNorm1d(3, track_running_stats=False), (4, 3)),
    "not affine": (nn.BatchNorm1d(3, affine=False), (4, 3)),
    "instance": (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 5)),
    "instance 2d": (nn.InstanceNorm2d(3, track_running_stats=True, momentum=0.4), (2, 3, 4, 4)),
    "instance, no statistics": (nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 4)),
    "group": (nn.GroupNorm(2, 4), (2, 4, 3)),
    "layer": (nn.LayerNorm(4), (2, 3, 4)),
    "rms": (nn.RMSNorm(4), (2, 3, 4)),
    "local response": (nn.LocalResponseNorm(2), (2, 4, 3)),
    "spectral": (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (2, 4)),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4)),
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, train, device):
    """Outputs, gradients and running statistics."""
    if name == "cumulative" and train and device.type == "xla":
        pytest.skip(EAGER_ON_XLA)
    module, shape = NORMS[name]
    agree(copy.deepcopy(module).train(train), lambda: (wave(*shape).requires_grad_(),), device=device, grad=True, tol=1e-4)


def test_an_empty_batch(device):
    """It leaves the statistics alone."""
    agree(nn.BatchNorm1d(3), lambda: (torch.zeros(0, 3, 4, requires_grad=True),), device=device, grad=True)


class Twice(nn.Module):
    """One layer used twice in a call: its statistics move twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.norm(x) * 2)


def test_one_batch_norm_twice_in_a_call(device):
    """The second use sees, and moves on, the statistics of the first."""
    agree(Twice(), lambda: (wave(4, 3).requires_grad_(),), device=device, grad=True, tol=1e-4)


def cumulative(n):
    return nn.BatchNorm1d(n, momentum=None)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, cumulative], ids=lambda f: f.__name__)
def test_training_then_evaluation(kind, device):
    """Three training steps, then evaluation with what they left."""
    if kind is cumulative and device.type == "xla":
        pytest.skip(EAGER_ON_XLA)
    eager = nn.Sequential(nn.Linear(3, 3), kind(3))
    ours = copy.deepcopy(eager).to(device)
    c = compiled(ours)
    for i in range(3):
        x = wave(4, 3) * (i + 1)
        torch.testing.assert_close(c(x.to(device)).cpu(), eager(x), rtol=1e-4, atol=1e-4)
    eager.eval(), ours.eval()
    x = wave(2, 3)
    torch.testing.assert_close(c(x.to(device)).cpu(), eager(x), rtol=1e-4, atol=1e-4)
    assert ours[1].num_batches_tracked.item() == 3


class Shared(nn.Module):
    """Two names and two layers for one parameter, one submodule under two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x):
        return self.again(self.b(self.a(x)).tanh())


def test_tied_weights(device):
    """One gradient, the sum over all uses."""
    agree(Shared(), lambda: (wave(2, 3),), device=device, grad=True)


class Attributes(nn.Module):
    """Tensors and numbers in all the places where modules keep them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.ones(3))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.plain = torch.ones(3)
        self.box = {"w": torch.ones(3)}
        self.items = [torch.ones(3)]
        self.number = 1.0

    def forward(self, x):
        return (x * self.buffer, x * self.hidden, x * self.plain, x * self.box["w"], x * self.items[0], x * self.number)

    def place(self, device):
        self.plain, self.box["w"], self.items[0] = (t.to(device) for t in (self.plain, self.box["w"], self.items[0]))
        return self.to(device)


def write(m):
    for t in (m.buffer, m.hidden, m.plain, m.box["w"], m.items[0]):
        t.mul_(3)
    m.number = 3.0


def replace(m):
    m.buffer, m.hidden, m.plain = m.buffer * 3, m.hidden * 3, m.plain * 3
    m.box["w"], m.items[0], m.number = m.box["w"] * 3, m.items[0] * 3, 3.0


def load(m):
    m.load_state_dict({"buffer": m.buffer * 3})
    for t in (m.hidden, m.plain, m.box["w"], m.items[0]):
        t.data = t.data * 3
    m.number = 3.0


@pytest.mark.parametrize("change", [write, replace, load], ids=lambda f: f.__name__)
def test_attributes_are_read_afresh(change, device):
    """Nothing that a caller can change is burnt into the program."""
    m = Attributes().place(device)
    c = compiled(m)
    x = torch.ones(3, device=device)
    assert [y.tolist() for y in c(x)] == [[1, 1, 1]] * 6
    change(m)
    assert [y.tolist() for y in c(x)] == [[3, 3, 3]] * 6


def test_optimizer_steps_are_seen(device):
    """Training by SGD and Adam follows eager."""
    for make in (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adam(p, 0.05)):
        torch.manual_seed(0)
        eager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        ours = copy.deepcopy(eager).to(device)
        for call, m, where in ((eager, eager, "cpu"), (compiled(ours), ours, device)):
            optimizer = make(m.parameters())
            for i in range(4):
                optimizer.zero_grad()
                call((wave(2, 3) + i).to(where)).square().mean().backward()
                optimizer.step()
        for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-4, atol=1e-5)
    assert pure_backend.statistics().traces == 1


class Counter(nn.Module):
    """Writes to its buffers by every road."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("history", torch.zeros(4, 3))
        self.register_buffer("replaced", torch.zeros(3))

    def forward(self, x):
        self.steps += 1
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.history[1:] = self.history[:-1].clone()
        self.history[0].copy_(x.detach()[0])
        self.replaced = self.replaced * 0.5 + x.detach().sum(0)
        return x * self.steps + self.mean


def test_buffers_written_by_forward(device):
    """State carried from call to call, by writes and by replacement."""
    eager = Counter()
    ours = copy.deepcopy(eager).to(device)
    c = compiled(ours)
    for i in range(3):
        x = wave(2, 3) + i
        torch.testing.assert_close(c(x.to(device)).cpu(), eager(x))
        for (name, a), b in zip(eager.named_buffers(), ours.buffers(), strict=True):
            torch.testing.assert_close(b.cpu(), a, msg=lambda text, n=name: f"{n}: {text}")


LAYERS = {
    "embedding, padding": (nn.Embedding(5, 3, padding_idx=1), lambda: (torch.tensor([[0, 1], [4, 1]]),)),
    "embedding, max_norm": (nn.Embedding(5, 3, max_norm=0.5), lambda: (torch.tensor([0, 2, 2]),)),
    "embedding bag": (nn.EmbeddingBag(5, 3), lambda: (torch.tensor([[0, 1], [4, 1]]),)),
    "conv transpose": (nn.ConvTranspose2d(2, 3, 3, stride=2), lambda: (wave(1, 2, 4, 4),)),
    "grouped conv": (nn.Conv1d(4, 4, 3, groups=2, padding="same"), lambda: (wave(2, 4, 6),)),
    "max pool with indices": (nn.MaxPool2d(2, return_indices=True), lambda: (wave(1, 2, 4, 4).requires_grad_(),)),
    "adaptive pool": (nn.AdaptiveAvgPool2d(3), lambda: (wave(1, 2, 5, 7).requires_grad_(),)),
    "lstm": (nn.LSTM(3, 4, batch_first=True), lambda: (wave(2, 3, 3),)),
    "gru, bidirectional": (nn.GRU(3, 4, bidirectional=True), lambda: (wave(2, 2, 3),)),
    "rnn cell": (nn.RNNCell(3, 4), lambda: (wave(2, 3), wave(2, 4))),
    "attention": (nn.MultiheadAttention(4, 2, batch_first=True), lambda: (wave(2, 3, 4),) * 3),
    "encoder layer": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), lambda: (wave(2, 3, 4),)),
    "prelu": (nn.PReLU(3), lambda: (wave(2, 3).requires_grad_(),)),
    "bilinear": (nn.Bilinear(3, 4, 2), lambda: (wave(2, 3), wave(2, 4))),
    "cross entropy": (
        nn.CrossEntropyLoss(ignore_index=1),
        lambda: (wave(3, 4).requires_grad_(), torch.tensor([0, 1, 3])),
    ),
    "upsample": (nn.Upsample(scale_factor=2, mode="bilinear"), lambda: (wave(1, 2, 3, 3).requires_grad_(),)),
    "pixel shuffle": (nn.PixelShuffle(2), lambda: (wave(1, 4, 2, 2).requires_grad_(),)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, device):
    """Layers with a twist in their semantics."""
    module, make_args = LAYERS[name]
    agree(module, make_args, device=device, grad=True, tol=1e-4)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.05, capturable=False),
    "adamw, no foreach": lambda p: torch.optim.AdamW(p, 0.05, foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_optimizer(name):
    """`torch.compile` of `optimizer.step`: every parameter and state is written in place."""
    results = []
    for wrap in (lambda f: f, compiled):
        torch._dynamo.reset()
        parameters = [nn.Parameter(wave(3, 2)), nn.Parameter(wave(4))]
        optimizer = OPTIMIZERS[name](parameters)
        step = wrap(optimizer.step)
        for i in range(3):
            for p in parameters:
                p.grad = wave(*p.shape) + i
            step()
        results.append([p.detach() for p in parameters])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
