"""Programs compiled for TPU by libtpu on a machine without one: what XLA and Mosaic made is read, nothing is run."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

from pure_backend import DeviceError, ImpureGraphError, impure, jax_op
from pure_backend.inspect import compile_for_tpu
from pure_backend.inspect import hlo as hlo_text
from pure_backend.inspect.hlo import Alias

MATRIX = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def _increment(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


def incremented(x: jax.Array) -> jax.Array:
    """`x + 1` by a kernel that writes where it reads."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_increment, out_shape=shape, input_output_aliases={0: 0}, name="increment")(x)


def incremented_elsewhere(x: jax.Array) -> jax.Array:
    """`x + 1` by a kernel with a result of its own."""
    return pl.pallas_call(_increment, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="increment")(x)


increment_ = jax_op("tpu_test::increment_", incremented, mutates_args=("x",))
increment = jax_op("tpu_test::increment", incremented_elsewhere, donate_argnames="x")


@impure
def watched(x: torch.Tensor) -> torch.Tensor:
    """What must run in eager."""
    return x


def test_a_kernel_in_place_makes_no_copy():
    program = compile_for_tpu(incremented, MATRIX, donate=[0])
    assert program.aliases == (Alias(0, 0),)
    assert [kernel.aliases for kernel in program.kernels] == [(Alias(0, 0),)]
    assert program.copies == () and program.memory.aliased == 256 * 256 * 4
    assert "output_to_operand_aliasing={{}: (0, {})}" in program.hlo and "copy" not in program.hlo


def test_a_kernel_that_does_not_alias_makes_one():
    """XLA brings the donated operand to VMEM first: the copy that the old question was about."""
    program = compile_for_tpu(incremented_elsewhere, MATRIX, donate=[0])
    (copy,) = program.copies_of("args[0]")
    assert (copy.bytes, copy.space, copy.shape) == (256 * 256 * 4, 1, "f32[256,256]")
    assert [kernel.aliases for kernel in program.kernels] == [()]
    assert "copy-start" in program.hlo and "output_to_operand_aliasing" not in program.hlo


def test_operators():
    program = compile_for_tpu(increment_, torch.zeros(256, 256))
    assert (program.inputs, program.outputs, program.aliases) == (("x",), ("new x",), (Alias(0, 0),))
    assert program.copies == ()
    assert compile_for_tpu(increment, torch.zeros(256, 256)).aliases == (Alias(0, 0),)


def test_torch_functions_that_write():
    """A captured write is a kernel in place: neither functionalization nor the write-back copies."""

    def f(x, y):
        increment_(x)
        return (x * y).sum()

    x = torch.zeros(256, 256)
    program = compile_for_tpu(f, x, torch.ones(256, 256))
    assert program.outputs[0].startswith("new ") and program.aliases == (Alias(0, 0),)
    assert program.kernels[0].aliases == (Alias(0, 0),)
    assert not [copy for copy in program.copies if copy.space == 0]
    assert x.sum() == 0  # nothing ran


def test_torch_functions_that_donate():
    """By their operators, or because the caller says so."""
    x, y = torch.zeros(256, 256), torch.ones(256, 256)
    assert compile_for_tpu(lambda x: increment(x), x).aliases == (Alias(0, 0),)
    given = compile_for_tpu(lambda x, y: x * 2 + y, x, y, donate=[1])
    assert [given.inputs[alias.input] for alias in given.aliases] == ["l_y"]
    assert compile_for_tpu(lambda x, y: x * 2 + y, x, y).aliases == ()


def test_modules_forward_and_backward():
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Tanh(), torch.nn.Linear(256, 128))
    forward = compile_for_tpu(model, torch.zeros(64, 128))
    assert forward.outputs == ("output 0", "residual 0") and len(forward.inputs) == 5
    assert forward.cost["flops"] >= 2 * 64 * 128 * 256 * 2
    backward = compile_for_tpu(model, torch.zeros(64, 128), backward=True)
    assert len(backward.outputs) == 4 and backward.inputs[-1] == "cotangent 0"
    assert backward.memory.outputs >= sum(p.numel() for p in model.parameters()) * 4
    assert "stablehlo.dot_general" in forward.stablehlo


def test_gradients_of_jax_functions():
    program = compile_for_tpu(lambda x, n: (jnp.sin(x).sum(), n + 1), MATRIX, jnp.arange(3), backward=True)
    assert program.outputs == ("gradient of args[0]",)
    with pytest.raises(ValueError, match="no gradient"):
        compile_for_tpu(lambda n: n + 1, jnp.arange(3), backward=True)


def _product(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


@jax_op("tpu_test::product")
def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """A product in a grid, as one writes it for JAX."""
    row, whole = pl.BlockSpec((128, 256), lambda i: (i, 0)), pl.BlockSpec((256, 256), lambda i: (0, 0))
    out = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32)
    return pl.pallas_call(_product, grid=(x.shape[0] // 128,), in_specs=[row, whole], out_specs=row, out_shape=out)(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_know_nothing_of_torch_settings(dtype):
    """Mosaic takes neither the 64-bit indices nor the bf16 products of f32 precision that programs are traced with."""
    x = torch.zeros(256, 256, dtype=dtype)
    assert len(compile_for_tpu(product, x, x).kernels) == 1
    assert len(compile_for_tpu(lambda x: product(x, x) @ x.float(), x).kernels) == 1


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_topologies(topology):
    program = compile_for_tpu(incremented, MATRIX, topology=topology, donate=[0])
    assert program.device.startswith("TPU v") and program.copies == ()
    assert topology in repr(program) and "output 0 in args[0]" in repr(program)


def test_mistakes(monkeypatch):
    with pytest.raises(ValueError, match="cannot describe topology 'v99:2x2'"):
        compile_for_tpu(incremented, MATRIX, topology="v99:2x2")
    with pytest.raises(ValueError, match="donate has 3, there are 1 positional"):
        compile_for_tpu(incremented, MATRIX, donate=[3])
    with pytest.raises(ValueError, match=r"donate has 1, which is no array of tpu_test::increment"):
        compile_for_tpu(increment, torch.zeros(8, 128), donate=[1])
    with pytest.raises(ValueError, match="donate has 1, which is no tensor"):
        compile_for_tpu(torch.sin, torch.zeros(8, 128), donate=[1])
    with pytest.raises(ValueError, match="nothing requires a gradient"):
        compile_for_tpu(torch.sin, torch.zeros(8, 128), backward=True)
    with pytest.raises(ValueError, match="no argument 'z'"):
        compile_for_tpu(incremented, MATRIX).copies_of("z")
    with pytest.raises(ImpureGraphError, match="watched"):
        compile_for_tpu(lambda x: watched(x).sum(), torch.zeros(8))
    from pure_backend.inspect import topology

    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"pip install 'pure_backend\[tpu\]'"):
        topology.tpu_topology.__wrapped__("v5e:2x2")


CHILD = """
import os, sys
import jax, jax.numpy as jnp
from pure_backend.inspect import compile_for_tpu
before = dict(os.environ)
flags = {name: str(value) for name, value in jax.config.values.items()}
print("ready", flush=True)
sys.stdin.readline()
program = compile_for_tpu(lambda x: x + 1, jax.ShapeDtypeStruct((8, 128), jnp.float32), donate=[0])
assert dict(os.environ) == before
assert {name: str(value) for name, value in jax.config.values.items()} == flags
assert jax.devices()[0].platform == "cpu"
print(len(program.aliases), flush=True)
sys.stdin.readline()
"""


def test_two_processes_at_once_and_nothing_changed():
    """libtpu's lock file stops nobody, and no environment variable or JAX flag is another afterwards."""
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    alive_together = [child.stdout.readline() for child in children]
    rest = [child.communicate("\n") for child in children]
    assert alive_together == ["1\n"] * 2, rest


def test_reading_hlo():
    text = """HloModule m, input_output_alias={ {0}: (2, {}, may-alias), {1}: (0, {}, must-alias) }, entry_computation_layout={}

%fused_computation (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %inner = bf16[8,128]{1,0} copy(%p)
  ROOT %outer = bf16[8,128]{0,1} copy(%inner)
}

ENTRY %main (a: f32[4], b: s8[3,5]) -> f32[4] {
  %a = f32[4]{0:T(256)} parameter(0)
  %b = s8[3,5]{1,0} parameter(1)
  %view = s8[5,3]{1,0} bitcast(%b)
  %copy-start = (s8[5,3]{1,0:S(1)}, s8[5,3]{1,0}, u32[]{:S(2)}) copy-start(%view)
  %k = (f32[4]{0}, f32[4]{0}) custom-call(%a, %a), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{0}: (1, {}), {1}: (0, {})}, metadata={}
  ROOT %r = f32[4]{0} copy(%k)
}
"""  # noqa: E501
    assert hlo_text.aliases(text) == (Alias(0, 2), Alias(1, 0))
    found = {copy.name: (copy.bytes, copy.space, copy.input) for copy in hlo_text.copies(text)}
    assert found == {"outer": (2048, 0, None), "copy-start": (15, 1, 1), "r": (16, 0, None)}
    assert hlo_text.kernels(text) == (hlo_text.Kernel("k", (Alias(0, 1), Alias(1, 0))),)
    assert hlo_text.cost([{"flops": 1.0, "bytes accessed": 2.0, "bytes accessed0{}": 3.0}]) == {"bytes_accessed": 2, "flops": 1}
