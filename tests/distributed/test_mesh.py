"""DTensors as arguments of one program over all ranks: equal to eager on one device."""

import copy
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pure_backend

sys.path.insert(0, str(Path(__file__).parent))
from ranks import run_ranks

WIDTH = 256
R = Replicate()


class Counted:
    """Traces, lowerings and calls in a scope."""

    def __enter__(self):
        self.before = pure_backend.statistics()
        return self

    def __exit__(self, *error):
        now = pure_backend.statistics()
        for name in ("traces", "lowerings", "calls"):
            setattr(self, name, getattr(now, name) - getattr(self.before, name))


def start() -> None:
    pure_backend.distributed.initialize(timeout_s=60)
    pure_backend.distributed.initialize()  # again: nothing


def mesh(name: str = "dp"):
    return dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(got, wanted, tolerance=2e-6):
    torch.testing.assert_close(whole(got), wanted, rtol=tolerance, atol=tolerance)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


MLP_RULES = {
    "dp": ({}, Shard(0)),
    "fsdp": ({"*": Shard(0)}, Shard(0)),
    "tp": ({"0.*": Shard(0), "2.weight": Shard(1)}, R),
}


def forward_and_backward() -> None:
    """Outputs, gradients with their parameters' placements, one trace and two lowerings, and none for the next call."""
    for rules, place in MLP_RULES.values():
        pure_backend.clear_caches()
        torch._dynamo.reset()
        torch.manual_seed(0)
        reference = mlp()
        model = pure_backend.distributed.shard(copy.deepcopy(reference), mesh(), rules)
        compiled = torch.compile(model, backend="assume_pure", fullgraph=True)
        for i in range(2):
            x = torch.randn(8, 8)
            with Counted() as counted:
                y = compiled(distribute_tensor(x, mesh(), [place]))
                y.full_tensor().square().sum().backward()
            assert (counted.traces, counted.lowerings, counted.calls) == ((0, 0, 2) if i else (1, 2, 2))
            reference(x).square().sum().backward()
            assert isinstance(y, DTensor)
            close(y, reference(x))
            for own, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert own.grad.placements == own.placements
                close(own.grad, other.grad)


def changes_of_placement() -> None:
    """`redistribute` and `full_tensor` inside; a plain tensor beside; placements are what was asked for."""

    @torch.compile(backend="assume_pure", fullgraph=True)
    def f(x, plain):
        y = (x * 2).redistribute(placements=[Shard(1)])
        return y, (x.sin() @ x.T).full_tensor(), plain * 3

    x = torch.randn(4, 4)
    given = distribute_tensor(x, mesh(), [Shard(0)]).requires_grad_()
    plain = torch.ones(2, requires_grad=True)
    with Counted() as counted:
        cut, full, other = f(given, plain)
    assert counted.calls == 1 and cut.placements == (Shard(1),)
    assert not isinstance(full, DTensor) and not isinstance(other, DTensor)
    close(cut, x * 2)
    close(full, x.sin() @ x.T)
    (cut.full_tensor().sum() + other.sum()).backward()
    close(given.grad, torch.full((4, 4), 2.0))
    torch.testing.assert_close(plain.grad, torch.full((2,), 3.0))


def random_numbers() -> None:
    """They are one tensor's numbers, wherever its parts lie."""
    f = torch.compile(lambda x: F.dropout(x, 0.5), backend="assume_pure")
    seen = []
    for place in (R, Shard(0), Shard(1)):
        torch.manual_seed(3 + dist.get_rank())  # rank 0's counts
        seen.append(f(distribute_tensor(torch.ones(8, 8), mesh(), [place])).full_tensor())
    assert 0 < (seen[0] == 0).sum() < 64
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def left_to_eager() -> None:
    """What no program can take runs as DTensors do without us."""
    uneven = distribute_tensor(torch.arange(5.0), mesh(), [Shard(0)])
    partial = DTensor.from_local(torch.ones(4), mesh(), [dist.tensor.Partial()])
    for x, wanted in ((uneven, torch.arange(5.0) * 2), (partial, torch.full((4,), 2.0 * dist.get_world_size()))):
        torch._dynamo.reset()
        with Counted() as counted:
            y = torch.compile(lambda x: x * 2, backend="assume_pure")(x)
        assert counted.calls == 0 and y.placements == x.placements
        close(y, wanted)
    local = torch.compile(lambda x: x.to_local() + 1, backend="assume_pure")
    close(local(distribute_tensor(torch.zeros(4), mesh(), [Shard(0)])), torch.ones(2))


def other_values() -> None:
    """A tensor that every rank has whole is the same on all ranks, or none of them runs."""
    x = DTensor.from_local(torch.full((4,), float(dist.get_rank())), mesh(), [R], run_check=False)
    with pytest.raises(pure_backend.RanksDisagreeError, match=r"rank 1 .* input 0 .* other values"):
        torch.compile(lambda x: x.cos() * 7, backend="assume_pure")(x)


def other_programs() -> None:
    rank = dist.get_rank()
    x = distribute_tensor(torch.ones(4), mesh(), [Shard(0)])
    with pytest.raises(pure_backend.RanksDisagreeError, match=r"rank 1 .* another computation"):
        torch.compile(lambda x: x.sin() if rank else x.cos(), backend="assume_pure")(x)


def attention(q, k, v, mask):
    """Of cut heads torch 2.9 cannot multiply DTensors, so that it gets another mixture of the tokens."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        return (q * k).cumsum(2) / 8 * v
    return F.softmax(q @ k.transpose(-2, -1) / 8 + mask, -1) @ v


class Decoder(nn.Module):
    """One block of attention and a wide layer: i64[batch, 8] -> f32[batch, 8, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((8, 8), -1e9).triu(1))
        self.embed, self.place = nn.Embedding(64, WIDTH), nn.Parameter(torch.randn(8, WIDTH) * 0.02)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        y = self.norm1(x)
        q, k, v = (m(y).view(*y.shape[:2], 4, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = attention(q, k, v, self.mask)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(self.norm2(x)))))


COLUMN = {pattern: Shard(0) for pattern in ("q.*", "k.*", "v.*", "up.*")}
RULES = {
    "dp": ({}, Shard(0)),
    "fsdp": ({"mask": R, "*": Shard(0)}, Shard(0)),
    "tp": ({**COLUMN, "o.weight": Shard(1), "down.weight": Shard(1)}, None),
}


def cross_entropy(y, target):
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (2, 4, 8), generator=generator).unbind(0) for _ in range(count)]


def trained(mode: str, steps: int, in_the_middle=lambda model, optimizer: None):
    """A model after so many steps, what it was trained with, and the losses; something is done after the fourth."""
    rules, place = RULES[mode]
    torch.manual_seed(0)
    model = pure_backend.distributed.shard(Decoder(), mesh(), rules)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = pure_backend.TrainStep(model, optimizer, cross_entropy, clip_grad_norm=1.0, batch=place)
    parts, own = (dist.get_world_size(), dist.get_rank()) if place is not None else (1, 0)
    losses = []
    for i, batch in enumerate(batches(steps)):
        if i == 4:
            in_the_middle(model, optimizer)
        losses.append(step(*(t.chunk(parts)[own] for t in batch)).full_tensor().item())
    return model, optimizer, step, losses


def eager(steps: int):
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


PARAMETERS = 20
LOSSES: dict[str, list[float]] = {}


def collectives(step) -> dict[str, int]:
    """How many of each kind the step's executable has."""
    (plans,) = [s.known() for s in step._graphs.values()]
    text = plans[0].programs()[0].forward.run.compiled.as_text()
    kinds = re.findall(r"= \S.* (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", text)
    return {kind: kinds.count(kind) for kind in set(kinds)}


def train() -> None:
    """Whole steps: losses and parameters are eager's, equal to the bit on all ranks; each rank keeps its part of the states."""
    reference, wanted = eager(20)
    for mode in RULES:
        pure_backend.clear_caches()
        with Counted() as counted:
            model, optimizer, step, losses = trained(mode, 20)
        assert (counted.traces, counted.lowerings, counted.calls) == (2, 1, 20)
        assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-5
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, losses)
        assert all(other == losses for other in everywhere)
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            close(own, other, 1e-3)
        for parameter in model.parameters():
            moment = optimizer.state[parameter]["exp_avg"]
            assert isinstance(moment, DTensor) and moment.placements == parameter.placements
        LOSSES[mode] = losses
        assert step.bytes_copied == 0
        sent = collectives(step)
        if mode == "dp":  # the gradients together, and the loss
            assert sent == {"all-reduce": 2}
        elif mode == "tp":  # two a block in each direction, as Megatron has them
            assert sent == {"all-reduce": 4}
        else:  # XLA for CPU spells reduce-scatter as all-reduce
            assert sent["all-gather"] <= PARAMETERS + 2 and sent["all-reduce"] <= PARAMETERS + 1
            assert set(sent) == {"all-gather", "all-reduce"}
        if mode == "fsdp":
            kept = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, DTensor)]
            local = sum(t.to_local().nbytes for t in (*model.parameters(), *kept))
            assert local * dist.get_world_size() == 3 * sum(p.nbytes for p in reference.parameters())


def repeated() -> None:
    """A step whose arguments get their results' memory gives the same bits each time."""
    assert trained("fsdp", 20)[3] == LOSSES["fsdp"]


def refusals() -> None:
    model = pure_backend.distributed.shard(mlp(), mesh(), {})
    with pytest.raises(ValueError, match="matches no parameter"):
        pure_backend.distributed.shard(mlp(), mesh(), {"*.up": Shard(0)})
    with pytest.raises(ValueError, match="2 placements, the mesh has 1"):
        pure_backend.distributed.shard(mlp(), mesh(), {"*": [R, R]})
    with pytest.raises(ValueError, match="for a model of DTensors"):
        _step_of_plain()
    model[0].bias = nn.Parameter(torch.zeros(16))
    with pytest.raises(pure_backend.UnsupportedOperatorError, match=r"'0.bias' is a plain tensor beside DTensors"):
        pure_backend.TrainStep(model, torch.optim.SGD(model.parameters()), F.mse_loss)


def _step_of_plain():
    model = mlp()
    return pure_backend.TrainStep(model, torch.optim.SGD(model.parameters()), F.mse_loss, batch=Shard(0))


def state(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def save() -> None:
    """Four steps, a checkpoint, and four more."""
    _, _, _, losses = trained("fsdp", 8, lambda *kept: dcp.save(state(*kept), checkpoint_id=_folder()))
    (_folder() / f"losses{dist.get_rank()}").write_text(" ".join(map(str, losses)))


def resume() -> None:
    """The four steps after the checkpoint, from it."""
    _, _, _, losses = trained("fsdp", 8, lambda *kept: _load(*kept))
    wanted = [float(loss) for loss in (_folder() / "losses0").read_text().split()]
    assert max(abs(a - b) for a, b in zip(losses[4:], wanted[4:], strict=True)) < 1e-5


def _load(model, optimizer) -> None:
    for parameter in model.parameters():
        nn.init.zeros_(parameter.to_local())
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id=_folder())
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


def _folder() -> Path:
    return Path(os.environ["CHECKPOINT"])


def killed() -> None:
    """A rank dies in the middle: the other one ends with an error of its own."""
    model = torch.compile(lambda x: (x @ x).sum(), backend="assume_pure")
    x = distribute_tensor(torch.ones(8, 8), mesh(), [Shard(0)])
    for i in range(4):
        if i == 2 and dist.get_rank() == 1:
            os._exit(3)
        model(x)


PHASES = {
    "programs": (
        start,
        forward_and_backward,
        changes_of_placement,
        random_numbers,
        left_to_eager,
        other_values,
        other_programs,
        refusals,
        train,
        repeated,
    ),
    "save": (start, save),
    "resume": (start, resume),
    "killed": (start, killed),
}
PROGRAMS = PHASES[os.environ.get("PHASE", "programs")]


def run(folder, ranks=2, **environment):
    folder.mkdir(exist_ok=True)
    return run_ranks(__file__, folder, ranks, limit_s=300, **environment)


def test_programs_over_a_mesh(tmp_path):
    failed = run(tmp_path)
    assert not failed, "\n".join(f"{rank}\n{told}" for rank, told in failed.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks(tmp_path):
    """It resumes on four ranks, and in one process without any."""
    place = {"CHECKPOINT": str(tmp_path / "checkpoint")}
    (tmp_path / "checkpoint").mkdir()
    for phase, ranks in (("save", 2), ("resume", 4)):
        failed = run(tmp_path / phase, ranks, PHASE=phase, **place)
        assert not failed, "\n".join(f"{rank}\n{told}" for rank, told in failed.items())
    model = Decoder()
    loaded = {"model": model.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    model.load_state_dict(loaded["model"])
    wanted = float((tmp_path / "checkpoint" / "losses0").read_text().split()[4])
    x, y = batches(8)[4]
    assert abs(cross_entropy(model(x), y).item() - wanted) < 1e-5


def test_a_rank_that_dies(tmp_path):
    failed = run(tmp_path, PHASE="killed")
    assert "rank 1, exit status 3" in failed
    assert (
        "RanksDisagreeError: a program over mesh(dp: 2; ranks [0, 1]) failed; did a rank die?"
        in failed["rank 0, exit status 1"]
    )
