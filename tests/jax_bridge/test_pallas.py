"""Pallas kernels of authors who know nothing of this package: traced in 32 bits, interpreted where no Mosaic is."""

import threading

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pure_backend import jax_op
from pure_backend.jax_bridge.pallas import kernels_as_written


def _times_steps(x_ref, o_ref, sum_ref):
    sum_ref[...] = jnp.zeros(x_ref.shape)
    sum_ref[...] = jax.lax.fori_loop(0, 3, lambda i, total: total + x_ref[...] * i, sum_ref[...])
    o_ref[...] = sum_ref[...]


@jax_op("pallas_test::times_three")
def times_three(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`3 x` in a kernel that says nothing of dtypes, and a result outside of it that is 64 bits wide in torch."""
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    kernel = pl.pallas_call(
        _times_steps,
        grid=(x.shape[0] // 8,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
    )
    return kernel(x), jnp.argmax(x)


def test_kernels_are_traced_in_32_bits():
    x = torch.randn(16, 128)
    tripled, where = times_three(x)
    torch.testing.assert_close(tripled, 3 * x)
    assert where.dtype is torch.int64 and where == x.argmax()
    compiled = torch.compile(lambda x: times_three(x)[0] + 1, backend="assume_pure", fullgraph=True)
    torch.testing.assert_close(compiled(x), 3 * x + 1)


def test_the_entry_of_pallas_is_put_back():
    from jax._src.pallas import pallas_call as module

    before, seen = module._pallas_call, []
    with kernels_as_written():
        thread = threading.Thread(target=lambda: seen.append(jax.make_jaxpr(_product_of_default_dtypes)()))
        with jax.enable_x64(True):
            here = jax.make_jaxpr(_product_of_default_dtypes)()
        thread.start()
        thread.join()
    assert module._pallas_call is before
    assert "f64" not in str(here) and len(seen) == 1


def _product_of_default_dtypes():
    def kernel(o_ref):
        o_ref[...] = jnp.zeros((8, 128)) * jnp.arange(128)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))()
