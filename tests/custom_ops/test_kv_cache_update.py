"""The cache update against its reference: in place, at any position."""

import jax
import pytest
import torch
from kernel_oracle import agrees_with_reference, as_array, assert_near

from pure_backend.custom_ops.kv_cache_update import kv_cache_update_, kv_cache_update_reference
from pure_backend.inspect import compile_for_tpu
from pure_backend.inspect.hlo import Alias


def tensors(seq, rows, dtype=torch.float32, dim=32):
    cache, new = (10 * torch.randn(2, 3, n, dim) for n in (seq, rows))
    return cache.to(dtype), new.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    "seq, rows, position",
    [(16, 1, 0), (16, 1, 15), (13, 3, 6), (64, 20, 7), (5, 2, 9), (64, 64, 0), (20, 1, [3, 18]), (40, 9, [31, 7]), (9, 4, -3)],
)
def test_values(seq, rows, position, dtype, device):
    cache, new = tensors(seq, rows, dtype)
    position = torch.tensor(position)
    want = kv_cache_update_reference(as_array(cache), as_array(new), as_array(position).clip(0))
    for way in (kv_cache_update_, torch.compile(kv_cache_update_, backend="assume_pure", fullgraph=True)):
        here = cache.clone().to(device)
        address, whole = here.data_ptr(), here.view(-1)
        assert way(here, new.to(device), position.to(device)) is None
        assert_near(here, want, 0.0, "cache")
        assert here.data_ptr() == address and torch.equal(whole.cpu(), here.cpu().view(-1))


@pytest.mark.parametrize("position", [torch.tensor(6), torch.tensor([0, 10], dtype=torch.int32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(position, dtype, device):
    cache, new = tensors(13, 3, dtype)
    agrees_with_reference(kv_cache_update_.functional, kv_cache_update_reference, (cache, new, position), device=device)


def test_decoding_in_a_loop(device):
    """The cache of a compiled step is the caller's own tensor, step after step, and one program serves all positions."""

    @torch.compile(backend="assume_pure", fullgraph=True)
    def step(cache, new, position):
        kv_cache_update_(cache, new, position)
        return cache.sum((0, 1, 3))

    cache = torch.zeros(1, 2, 8, 4, device=device)
    for i in range(8):
        total = step(cache, torch.full((1, 2, 1, 4), i + 1.0, device=device), torch.tensor(i, device=device))
    assert total.cpu().tolist() == [8.0 * (i + 1) for i in range(8)]


def test_what_is_refused():
    cache, new = tensors(8, 2)
    position = torch.tensor(1)
    for args, message in (
        ((cache[0], new, position), r"argument 'cache' has shape \(3, 8, 32\), expected \[batch, heads, seq, dim\]"),
        ((cache.double(), new.double(), position), "argument 'cache' is float64, expected float32, bfloat16 or int8"),
        ((cache, new.bfloat16(), position), "argument 'new' is bfloat16, 'cache' is float32"),
        ((cache, new[:, :2], position), r"argument 'new' has shape \(2, 2, 2, 32\), expected \(2, 3, 2, 32\)"),
        ((new, cache, position), "argument 'new' has 8 rows, the cache 2"),
        ((cache, new, position.float()), "argument 'position' is float32: give an integer tensor"),
        ((cache, new, torch.tensor([1, 1, 1])), r"argument 'position' has shape \(3,\), expected \(\) or \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_cache_update_(*args)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_no_copy_of_the_cache(dtype, topology):
    """Mosaic compiles it, the result lies in the cache, and nothing of the cache's size is copied."""
    for rows, dims in ((1, ()), (20, (2,))):
        cache, new = (jax.ShapeDtypeStruct((2, 3, n, 128), dtype) for n in (2048, rows))
        program = compile_for_tpu(kv_cache_update_, cache, new, jax.ShapeDtypeStruct(dims, "int64"), topology=topology)
        assert program.aliases == (Alias(0, 0),) and program.outputs == ("new cache",)
        assert [kernel.aliases for kernel in program.kernels] == [(Alias(0, 1),)]  # operand 0 is the position
        assert program.copies_of("cache") == ()
        assert sum(copy.bytes for copy in program.copies) < cache.size // 8
        assert program.hlo.count(" while(") == 0


@pytest.mark.parametrize("seq, rows, dim", [(13, 3, 64), (5, 2, 128), (20, 20, 80)])
def test_odd_sizes_lower_through_mosaic(seq, rows, dim):
    cache, new = (jax.ShapeDtypeStruct((2, 3, n, dim), "float32") for n in (seq, rows))
    for backward in (False, True):
        operator = kv_cache_update_.functional if backward else kv_cache_update_
        program = compile_for_tpu(operator, cache, new, jax.ShapeDtypeStruct((2,), "int32"), backward=backward)
        assert len(program.kernels) == (0 if backward else 1)
