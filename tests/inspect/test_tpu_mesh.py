"""Programs for many TPU devices, compiled without one: memory, collectives and their axes."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from pure_backend import DeviceError, TrainStep
from pure_backend.__main__ import main
from pure_backend.inspect import compile_for_tpu
from pure_backend.inspect.collectives import collectives

WIDTH, ROWS = 256, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def step_of(blocks: int) -> tuple[TrainStep, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), nn.functional.mse_loss)
    return step, torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)


def bytes_of_state(step: TrainStep) -> int:
    """Parameters and both moments."""
    return 3 * sum(p.numel() * p.element_size() for p in step.model.parameters())


TENSOR_PARALLEL = {"*.up.*": ("tp",), "*.down.weight": (None, "tp")}


def test_fully_sharded_step():
    """Each device has its part of parameters and states, in place; each matrix is gathered for a direction at most."""
    step, x, y = step_of(2)
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    program = compile_for_tpu(step, x, y, topology="v5e:4x4", mesh={"fsdp": 16}, rules={"*": Shard(0)})
    own = bytes_of_state(step) / 16
    assert own <= program.memory.aliased <= 1.2 * own, (own, program.memory)  # tiles are padded
    assert program.memory.arguments < 1.4 * own
    assert program.shardings["0.up.weight"] == program.shardings["exp_avg of 0.up.weight"] == ("fsdp",)
    assert program.shardings["step of 0.up.weight"] == ()
    gathers = [c.argument for c in program.collectives if c.kind == "all-gather" and c.argument.endswith("up.weight")]
    assert gathers and all(gathers.count(name) <= 2 for name in gathers)
    assert {c.axes for c in program.collectives} == {("fsdp",)}
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    assert not step.optimizer.state


def test_data_and_tensor_parallel_step():
    """Two all-reduces a block over tp, and those of the gradients over dp; nothing is gathered."""
    step, x, y = step_of(2)
    program = compile_for_tpu(step, x, y, topology="v5e:4x4", mesh={"dp": 4, "tp": 4}, rules=TENSOR_PARALLEL)
    assert program.mesh == {"dp": 4, "tp": 4}
    over_tp = [(c.kind, c.module, c.backward) for c in program.collectives if c.axes == ("tp",)]
    assert sorted(over_tp) == [("all-reduce", f"{i}/{name}", name == "up") for i in range(2) for name in ("down", "up")]
    assert {c.kind for c in program.collectives if c.axes == ("dp",)} == {"all-reduce"}
    assert program.warnings == ()
    matrices = (
        3 * 4 * sum(p.numel() for name, p in step.model.named_parameters() if "up" in name or name.endswith("down.weight"))
    )
    assert matrices / 4 <= program.memory.aliased <= 1.3 * matrices / 4
    assert program.cost["flops"] < 1.2 * 6 * ROWS / 4 * sum(p.numel() for p in step.model.parameters()) / 4 + 5e6


def test_modules_and_placements():
    """A module's forward; placements are one for each axis of the mesh."""
    model = nn.Sequential(Block())
    rules = {
        "*.up.weight": (Replicate(), Shard(0)),
        "*.up.bias": [Replicate(), Shard(0)],
        "*.down.weight": (Replicate(), Shard(1)),
    }
    program = compile_for_tpu(model, torch.ones(ROWS, WIDTH), topology="v5e:2x2", mesh={"dp": 2, "tp": 2}, rules=rules)
    assert [(c.kind, c.axes, c.module) for c in program.collectives] == [("all-reduce", ("tp",), "0/down")]


def test_what_is_gathered_whole():
    def gathered(x):
        return (x.sin() @ x.sin().T) @ x

    program = compile_for_tpu(gathered, torch.ones(WIDTH, WIDTH), topology="v5e:2x2", mesh={"dp": 4})
    assert program.warnings and "gathered over dp" in program.warnings[0] and "262,144 bytes" in program.warnings[0]


def test_mistakes():
    model, x = nn.Linear(6, 6), torch.ones(8, 6)
    on = {"topology": "v5e:2x2", "mesh": {"dp": 4}}
    with pytest.raises(ValueError, match=r"has 8 devices, v5e:2x2 has 4"):
        compile_for_tpu(model, x, topology="v5e:2x2", mesh={"dp": 4, "tp": 2})
    with pytest.raises(ValueError, match=r"rule '\*.up' matches no parameter"):
        compile_for_tpu(model, x, **on, rules={"*.up": Shard(0)})
    with pytest.raises(ValueError, match=r"weight of shape \(6, 6\).*dimension 0 does not divide by 4"):
        compile_for_tpu(model, x, **on, rules={"weight": Shard(0)})
    with pytest.raises(ValueError, match="'tp', which is no axis"):
        compile_for_tpu(model, x, **on, rules={"weight": ("tp", None)})
    with pytest.raises(ValueError, match="2 placements for the axes"):
        compile_for_tpu(model, x, **on, rules={"weight": (Shard(0), Shard(1))})
    with pytest.raises(ValueError, match="a mesh is for torch"):
        compile_for_tpu(lambda x: x, torch.ones(3).numpy(), **on)
    step = TrainStep(model, torch.optim.SGD(model.parameters()), nn.functional.mse_loss)
    with pytest.raises(ValueError, match="has no gradient"):
        compile_for_tpu(step, x, x, backward=True)
    with pytest.raises(ValueError, match="donates what it updates"):
        compile_for_tpu(step, x, x, donate=[0])


def test_what_does_not_fit():
    whole = jax.ShapeDtypeStruct((65536, 65536), jnp.float32)
    with pytest.raises(DeviceError, match=r"does not fit a device of v5e:2x2: .*32\.00G"):
        compile_for_tpu(lambda x: jnp.sin(x) @ x, whole)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups=[2,4]<=[8]", ("b",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("a",)),
        ("replica_groups=[1,8]<=[8]", ("a", "b")),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", ("b",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("b",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1','axis_2'}", ("b",)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}", ()),
        ("replica_groups={}", ()),
    ],
)
def test_axes_of_groups(groups, axes):
    """All ways in which HLO's text names groups of devices, on a mesh of 2 x 4."""
    metadata = 'metadata={op_name="jit(f)/transpose(jvp(fn/__closure__/2/cell_contents/blocks/0/up))/dot_general"}'
    line = f"  %x = (f32[8,4]{{1,0}}, bf16[4]{{0}}) all-reduce(%a, %b), channel_id=3, {groups}, {metadata}"
    (found,) = collectives(f"{line}\n{line}", {"a": 2, "b": 4}, ())
    assert (found.axes, found.bytes, found.module, found.backward) == (axes, 8 * 4 * 4 + 4 * 2, "blocks/0/up", True)


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "plan_slices.py"


def test_the_command(tmp_path, capsys):
    """A table on stdout, progress on stderr; a mistake is a line, and 2."""
    smaller = EXAMPLE.read_text().replace("BLOCKS, ROWS = 256, 2, 1024", "BLOCKS, ROWS = 256, 1, 64")
    (tmp_path / "plan.py").write_text(smaller)
    target = f"{tmp_path / 'plan.py'}:data_and_tensor_parallel"
    assert main(["plan", target, "--topology", "v5e:2x2", "--mesh", "dp=2,tp=2"]) == 0
    shown = capsys.readouterr()
    assert "dp 2 x tp 2" in shown.out and "all-reduce" in shown.out and "temporaries" in shown.out
    assert "compiling for v5e:2x2: " in shown.err
    for words, reason in (
        (["--mesh", "dp=2"], "has 2 devices"),
        (["--mesh", "dp"], "is no mesh"),
        (["--topology", "v9:1"], "v9:1"),
    ):
        assert main(["plan", target, *words]) == 2
        assert reason in capsys.readouterr().err
