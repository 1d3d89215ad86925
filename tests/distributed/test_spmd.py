"""torch_xla's SPMD on 8 virtual devices: losses equal to eager's, and shardings of parameters and states kept."""

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pure_backend

sys.path.insert(0, str(Path(__file__).parent))
from models import WIDTH, Counted, Model
from ranks import run_ranks

STEPS = 3


@functools.cache
def _spmd():
    """torch_xla's module. SPMD is for a whole process, and to be switched on before the first tensor."""
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
    return spmd


def device() -> torch.device:
    _spmd()
    import torch_xla

    return torch_xla.device()


def mesh(shape: tuple[int, ...], names: tuple[str, ...]):
    return _spmd().Mesh(np.arange(8), shape, names)


def sharding(tensor: torch.Tensor) -> str:
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def fsdp(name: str, parameter: torch.Tensor):
    return mesh((8,), ("fsdp",)), ("fsdp",) + (None,) * (parameter.ndim - 1)


def data_and_tensor(name: str, parameter: torch.Tensor):
    specs = {"up.weight": ("model", None), "down.weight": (None, "model"), "up.bias": ("model",)}
    spec = next((spec for end, spec in specs.items() if name.endswith(end)), (None,) * parameter.ndim)
    return mesh((4, 2), ("data", "model")), spec


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(16, WIDTH), torch.randn(16, 16)) for _ in range(STEPS)]


def train(model: nn.Module, data, forward=None) -> list[float]:
    """The loop that everybody writes."""
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss((forward or model)(x), y)
        loss.backward()
        optimizer.step()
        sync(loss)
        losses.append(float(loss))
    _same_shardings(model, optimizer)
    return losses


def train_by_step(model: nn.Module, data) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = pure_backend.TrainStep(model, optimizer, nn.functional.mse_loss)
    losses = []
    for x, y in data:
        losses.append(step(x, y))
        sync(losses[-1])
    _same_shardings(model, optimizer)
    return [float(loss) for loss in losses]


def sync(tensor: torch.Tensor) -> None:
    if tensor.device.type == "xla":
        import torch_xla

        torch_xla.sync()


def _same_shardings(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "xla":
            moments = [sharding(state) for state in optimizer.state[parameter].values() if state.ndim]
            assert moments == [sharding(parameter)] * 2, (name, moments)


@functools.cache
def eager_losses() -> list[float]:
    torch.manual_seed(0)
    return train(Model(1), batches())


def sharded_model(plan) -> nn.Module:
    """The model on the devices, each parameter where the plan has it."""
    torch.manual_seed(0)
    model = Model(1).to(device())
    for name, parameter in model.named_parameters():
        _spmd().mark_sharding(parameter, *plan(name, parameter))
    return model


def sharded_batches(plan):
    """Each batch cut along the first axis of the plan's mesh."""
    for pair in batches():
        pair = [tensor.to(device()) for tensor in pair]
        for tensor in pair:
            where, _ = plan("", tensor)
            _spmd().mark_sharding(tensor, where, (where.axis_names[0], None))
        yield pair


def _through_both(plan) -> None:
    for train_with in (lambda model, data: train(model, data, torch.compile(model, backend="assume_pure")), train_by_step):
        torch._dynamo.reset()
        model = sharded_model(plan)
        before = {name: sharding(p) for name, p in model.named_parameters()}
        assert any("devices=" in text for text in before.values())
        with Counted() as counted:
            losses = train_with(model, sharded_batches(plan))
        np.testing.assert_allclose(losses, eager_losses(), atol=2e-6)
        assert {name: sharding(p) for name, p in model.named_parameters()} == before
        assert counted.calls >= STEPS


def fully_sharded() -> None:
    _through_both(fsdp)


def data_and_tensor_parallel() -> None:
    _through_both(data_and_tensor)


def fsdp_of_torch_xla() -> None:
    """`SpmdFullyShardedDataParallel`, whose output is annotated by a function that Dynamo can trace."""
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    where = mesh((8,), ("fsdp",))
    rows = pure_backend.XlaSharding(where, ("fsdp", None))
    torch.manual_seed(0)
    model = SpmdFullyShardedDataParallel(Model(1), mesh=where, shard_output=lambda y, mesh: rows(y))
    before = {name: sharding(p) for name, p in model.named_parameters()}
    with Counted() as counted:
        losses = train(model, sharded_batches(fsdp), torch.compile(model, backend="assume_pure"))
    np.testing.assert_allclose(losses, eager_losses(), atol=2e-6)
    assert {name: sharding(p) for name, p in model.named_parameters()} == before
    assert counted.calls >= 2 * STEPS


def annotated(tensor: torch.Tensor, text: str) -> int:
    import torch_xla

    lines = torch_xla._XLAC._get_xla_tensors_hlo([tensor]).splitlines()
    return sum(f'custom_call_target="Sharding", sharding={text}' in line for line in lines)


def annotating(mark: pure_backend.XlaSharding):
    return lambda x: mark(x * 2).sin()


def annotations_inside() -> None:
    """In forward and backward, compiled whole; another sharding is another program, the same is the same."""
    grid = mesh((4, 2), ("data", "model"))
    texts = {
        ("data", None): "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
        ("data", "model"): "{devices=[4,2]0,1,2,3,4,5,6,7}",
    }
    for spec, text in texts.items():
        for traces in (1, 0):
            x = torch.linspace(0, 1, 64).view(8, 8).to(device()).requires_grad_()
            with Counted() as counted:
                y = torch.compile(annotating(pure_backend.XlaSharding(grid, spec)), backend="assume_pure", fullgraph=True)(x)
                (grad,) = torch.autograd.grad(y.sum(), x)
            assert counted.traces == traces, (spec, counted.traces)
            assert annotated(y, text) == 1 and annotated(grad, text) >= 1
            want = torch.linspace(0, 1, 64).view(8, 8) * 2
            torch.testing.assert_close(y.detach().cpu(), want.sin())
            torch.testing.assert_close(grad.cpu(), 2 * want.cos())
            kept.append(y)  # a program dies with its last user
    pure_backend.XlaSharding(grid, spec)(x).sum().backward()  # where nothing is compiled
    torch.testing.assert_close(x.grad.cpu(), torch.ones(8, 8))


kept = []


def inputs_lie_elsewhere() -> None:
    """One program serves any sharding of its inputs: torch_xla's partitioner compiles it for each."""
    compiled = torch.compile(lambda x: (x @ x).sin(), backend="assume_pure")
    where, value = mesh((8,), ("all",)), torch.linspace(0, 1, 256).view(16, 16)
    for i, spec in enumerate([None, ("all", None), (None, "all")]):
        x = value.to(device())
        if spec is not None:
            _spmd().mark_sharding(x, where, spec)
        with Counted() as counted:
            torch.testing.assert_close(compiled(x).cpu(), (value @ value).sin(), rtol=1e-4, atol=1e-5)
        assert counted.traces == (i == 0)


def mistakes() -> None:
    grid = mesh((4, 2), ("data", "model"))
    with pytest.raises(ValueError, match="no axis 'rows'"):
        pure_backend.XlaSharding(grid, ("rows", None))
    with pytest.raises(ValueError, match="splits one dimension"):
        pure_backend.XlaSharding(grid, ("data", ("model", "data")))


PROGRAMS = [fully_sharded, data_and_tensor_parallel, fsdp_of_torch_xla, annotations_inside, inputs_lie_elsewhere, mistakes]


@pytest.mark.xla
def test_eight_devices(tmp_path):
    pytest.importorskip("torch_xla")
    assert run_ranks(__file__, tmp_path, ranks=1, CPU_NUM_DEVICES="8") == {}
