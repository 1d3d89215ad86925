"""`DistributedDataParallel` as it is: gradients equal to eager's, by compiled calls."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pure_backend

sys.path.insert(0, str(Path(__file__).parent))
from models import WIDTH, Counted, Model, agree, alike, batch, equal_on_all_ranks, gradients, loss, twins
from ranks import run_ranks

SMALL = 1  # MB a bucket: a block has as much


def compiled(model: nn.Module, **options) -> nn.Module:
    return torch.compile(model, backend="assume_pure", **options)


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    loss(model(x)).backward()


def pair(make=Model, **options) -> tuple[nn.Module, nn.Module]:
    """A compiled one and an eager one."""
    model, reference = twins(make)
    return compiled(DDP(model, **options)), DDP(reference, **options)


def buckets() -> None:
    """One graph a bucket, compiled once; the gradient is the one of the whole batch in one process."""
    pure_backend.clear_caches()
    model, reference = pair(bucket_cap_mb=SMALL)
    for i in range(3):
        with Counted() as counted:
            step(model, batch(i))
        step(reference, batch(i))
        agree(model, reference)
        equal_on_all_ranks(model)
        assert (counted.traces > 1) == (i == 0), counted.traces
        assert counted.calls >= 4, counted.calls  # forward and backward of more than one graph
    alone, _ = twins()
    parts = [torch.empty(8, WIDTH) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, batch(2))
    step(alone, torch.cat(parts))
    agree(model, alone)


def hooks() -> None:
    """Hooks on parameters and the communication hook see what they see in eager."""
    seen = {}
    for name, model in zip(("compiled", "eager"), pair(bucket_cap_mb=SMALL), strict=True):
        events = seen[name] = []
        inner = model.module
        inner.blocks[0].up.weight.register_hook(lambda grad: grad * 2)
        inner.head.bias.register_post_accumulate_grad_hook(lambda p, events=events: events.append(("after", p.grad.sum())))

        def sent(state, bucket):
            state.append(("sent", bucket.buffer().numel()))
            work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return work.then(lambda future: future.value()[0] / dist.get_world_size())

        (model._orig_mod if name == "compiled" else model).register_comm_hook(events, sent)
        with Counted() as counted:
            step(model, batch())
        assert (counted.calls > 0) == (name == "compiled")
        seen[name, "gradients"] = gradients(model)
    assert sorted(map(str, [e[0] for e in seen["compiled"]])) == sorted(map(str, [e[0] for e in seen["eager"]]))
    assert [e for e in seen["compiled"] if e[0] == "sent"] == [e for e in seen["eager"] if e[0] == "sent"]
    for name, grad in seen["eager", "gradients"].items():
        torch.testing.assert_close(seen["compiled", "gradients"][name], grad, rtol=1e-4, atol=1e-6)


def accumulation() -> None:
    """`no_sync` adds up on each rank, and the last backward sends the sum."""
    model, reference = pair(bucket_cap_mb=SMALL)
    for each in (model, reference):
        each.zero_grad()
        with each.no_sync():
            loss(each(batch(0))).backward()
        local = gradients(each)["head.bias"].clone()
        others = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(others, local)
        assert not torch.equal(*others)
        loss(each(batch(1))).backward()
    agree(model, reference)
    equal_on_all_ranks(model)


def static_graph() -> None:
    model, reference = pair(bucket_cap_mb=SMALL, static_graph=True)
    for i in range(3):
        step(model, batch(i))
        step(reference, batch(i))
        agree(model, reference)


class Unused(Model):
    """A block that not every call uses, and buffers that are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        x = self.batch_norm(x)
        return self.head(self.blocks[0](x) if skip else self.blocks[1](self.blocks[0](x)))


def unused_parameters_and_buffers() -> None:
    model, reference = pair(Unused, find_unused_parameters=True)
    for i, skip in enumerate((True, False, True)):
        for each in (model, reference):
            each.zero_grad()
            loss(each(batch(i), skip)).backward()
        agree(model, reference)
        for got, want in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(got, want)


def mixed_precision() -> None:
    """Autocast around, and parameters in bfloat16."""
    model, reference = pair(bucket_cap_mb=SMALL)
    with Counted() as counted, torch.autocast("cpu", torch.bfloat16):
        step(model, batch())
        step(reference, batch())
    assert counted.calls > 0
    alike(model, reference)
    model, reference = pair(lambda: Model().bfloat16())
    step(model, batch().bfloat16())
    step(reference, batch().bfloat16())
    assert {grad.dtype for grad in gradients(model).values()} == {torch.bfloat16}
    alike(model, reference)


def steps_of_an_optimizer() -> None:
    """Parameters change in place between calls, and the ranks stay together."""
    model, reference = pair(bucket_cap_mb=SMALL)
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        for i in range(5):
            step(each, batch(i))
            optimizer.step()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def of_torchs_own_module() -> None:
    """Dynamo enters no module of torch's from a frame that it skipped, as DDP's is: it is compiled before it is wrapped."""

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 16))

    model, reference = twins(layers)
    report = pure_backend.explain(DDP(layers()))(batch())
    assert (
        "DistributedDataParallel around Sequential" in str(report)
        and "DDP(torch.compile(module" in report.breaks[0].explanation
    )
    model, reference = DDP(compiled(model), bucket_cap_mb=SMALL), DDP(reference, bucket_cap_mb=SMALL)
    for i in range(2):
        with Counted() as counted:
            step(model, batch(i))
        step(reference, batch(i))
        agree(model, reference)
        assert counted.calls > 0
    assert "around" not in str(pure_backend.explain(DDP(Layers(nn.Linear(WIDTH, 16))))(batch()))


class Layers(nn.Sequential):
    """What the report recommends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def a_training_step_says_what_to_do() -> None:
    """A step is one program, and DDP sends gradients in the middle of it."""
    model = DDP(Model())
    with pytest.raises(TypeError, match=r"DistributedDataParallel.*torch\.compile\(model, backend='assume_pure'\)"):
        pure_backend.TrainStep(model, torch.optim.AdamW(model.parameters()), nn.functional.mse_loss)


PROGRAMS = [
    buckets,
    hooks,
    accumulation,
    static_graph,
    unused_parameters_and_buffers,
    mixed_precision,
    steps_of_an_optimizer,
    of_torchs_own_module,
    a_training_step_says_what_to_do,
]


def test_two_ranks(tmp_path):
    assert run_ranks(__file__, tmp_path) == {}
