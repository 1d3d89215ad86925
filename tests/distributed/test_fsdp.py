"""FSDP2 (`fully_shard`) as it is: gradients equal to eager's, by compiled calls, and memory freed when eager frees it."""

import importlib.util
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import pure_backend

sys.path.insert(0, str(Path(__file__).parent))
from models import WIDTH, Counted, Model, agree, alike, batch, gradients, loss, twins
from ranks import run_ranks


def sharded(model: nn.Module, blocks: bool = True, **options) -> nn.Module:
    """The model cut over all ranks, block by block or as one."""
    for block in model.blocks if blocks else ():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def pair(blocks: bool = True, **options) -> tuple[nn.Module, nn.Module]:
    """A compiled one and an eager one."""
    model, reference = (sharded(each, blocks, **options) for each in twins())
    return torch.compile(model, backend="assume_pure"), reference


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    loss(model(x)).backward()


def _agree_over_steps(model: nn.Module, reference: nn.Module, least_calls: int) -> None:
    pure_backend.clear_caches()
    for i in range(3):
        with Counted() as counted:
            step(model, batch(i))
        step(reference, batch(i))
        agree(model, reference)
        assert counted.calls >= least_calls, counted.calls
        assert (counted.traces > 0) == (i == 0), counted.traces


def around_blocks() -> None:
    """Graphs end at the hooks, so each block is a forward and a backward; equal blocks share a program."""
    _agree_over_steps(*pair(), least_calls=4)


def around_the_whole() -> None:
    _agree_over_steps(*pair(blocks=False), least_calls=2)


def without_resharding() -> None:
    _agree_over_steps(*pair(reshard_after_forward=False), least_calls=4)


def one_process_has_the_same_gradient() -> None:
    model, _ = pair()
    alone, _ = twins()
    parts = [torch.empty(8, WIDTH) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, batch())
    step(alone, torch.cat(parts))
    step(model, batch())
    agree(model, alone)


def gathered(block: FSDPModule) -> list[torch.Tensor]:
    """The plain parameters that a block computes with."""
    return [p._unsharded_param for p in block._get_fsdp_state()._fsdp_param_group.fsdp_params]


def memory_is_freed() -> None:
    """What a block gathers has no memory after its forward and its backward, although programs read it through views."""
    model, _ = pair()
    blocks = list(model._orig_mod.blocks)
    for i in range(2):
        y = loss(model(batch(i)))
        for block in blocks:
            assert len(gathered(block)) == 6
            assert [p.untyped_storage().nbytes() for p in gathered(block)] == [0] * 6
        y.backward()
        assert [p.untyped_storage().nbytes() for block in blocks for p in gathered(block)] == [0] * 12
    own = sum(p.to_local().numel() for p in model.parameters())
    assert own * dist.get_world_size() == sum(p.numel() for p in model.parameters())


def memory_comes_back_elsewhere() -> None:
    """What was at the old place between two gatherings does not matter."""
    model, reference = pair()
    for i in range(3):
        model.zero_grad()
        y = loss(model(batch(i)))
        taken = [torch.full((2 * WIDTH, WIDTH), float("nan")) for _ in range(12)]  # the allocator gives freed memory again
        y.backward()
        step(reference, batch(i))
        agree(model, reference)
        del taken


def accumulation() -> None:
    model, reference = pair()
    for each in (model, reference):
        inner = getattr(each, "_orig_mod", each)
        each.zero_grad()
        inner.set_requires_gradient_sync(False)
        loss(each(batch(0))).backward()
        inner.set_requires_gradient_sync(True)
        loss(each(batch(1))).backward()
    agree(model, reference)


def mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = pair(mp_policy=policy)
    for i in range(2):
        with Counted() as counted:
            step(model, batch(i))
        step(reference, batch(i))
        assert counted.calls >= 4
        assert {grad.dtype for grad in gradients(model).values()} == {torch.float32}
        alike(model, reference)


def steps_of_an_optimizer() -> None:
    """With clipping by the global norm; parameters, moments and gradients stay DTensors."""
    model, reference = pair()
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        for i in range(5):
            step(each, batch(i))
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
        assert all(type(p.grad) is type(p.data) for p in each.parameters())
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.to_local(), want.to_local(), rtol=1e-3, atol=1e-4)


class Layers(nn.Sequential):
    """A class of one's own around torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def of_torchs_own_module() -> None:
    """Dynamo enters no module of torch's from a frame that it skipped; the report says so, and what to do works."""
    torchs, own = (fully_shard(kind(nn.Linear(WIDTH, WIDTH), nn.GELU())) for kind in (nn.Sequential, Layers))
    report = pure_backend.explain(torchs)(batch())
    assert "fully_shard on Sequential is not compiled" in str(report)
    with Counted() as counted:
        torch.compile(own, backend="assume_pure")(batch()).sum().backward()
    assert counted.calls == 2


def a_training_step_says_what_to_do() -> None:
    model = sharded(Model())
    with pytest.raises(TypeError, match=r"fully_shard.*torch\.compile\(model, backend='assume_pure'\)"):
        pure_backend.TrainStep(model, torch.optim.AdamW(model.parameters()), nn.functional.mse_loss)


def beside_jax_distributed() -> None:
    """First, since it comes before JAX starts: all that follows is on a rank's own devices."""
    import jax

    address = [None]
    if dist.get_rank() == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = [f"localhost:{free.getsockname()[1]}"]
    dist.broadcast_object_list(address)
    jax.distributed.initialize(address[0], dist.get_world_size(), dist.get_rank())
    assert (len(jax.devices()), len(jax.local_devices())) == (2, 1)


def the_example() -> None:
    spec = importlib.util.spec_from_file_location("train_ranks", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for mode in ("ddp", "fsdp"):
        with Counted() as counted:
            losses = example.train(mode, 5)
        torch.testing.assert_close(losses, example.train(mode, 5, backend="eager"), rtol=1e-4, atol=1e-5)
        assert counted.calls >= 10


EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ranks.py"
PROGRAMS = [
    beside_jax_distributed,
    around_blocks,
    around_the_whole,
    without_resharding,
    one_process_has_the_same_gradient,
    memory_is_freed,
    memory_comes_back_elsewhere,
    accumulation,
    mixed_precision,
    steps_of_an_optimizer,
    of_torchs_own_module,
    a_training_step_says_what_to_do,
    the_example,
]


def test_two_ranks(tmp_path):
    assert run_ranks(__file__, tmp_path) == {}
