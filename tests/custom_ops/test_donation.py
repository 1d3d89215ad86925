"""Donated and aliased memory, seen in torch_xla's counters, and the public reports on it (group B of the cases)."""

import gc

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from oracle import agree, compiled
from torch import nn

import pure_backend
from pure_backend import jax_op


@jax_op("donation_test::bump", donate_argnames="x")
def bump(x: jax.Array) -> jax.Array:
    """`x + 1` in the memory of `x`."""
    return x + 1


@jax_op("donation_test::cast", donate_argnums=0)
def cast(x: jax.Array) -> jax.Array:
    """Another type, for which the memory of `x` is of no use."""
    return x.astype(jnp.bfloat16)


def _put_page(index_ref, page_ref, cache_ref, out_ref):
    out_ref[pl.ds(index_ref[0], 1), :] = page_ref[...][None]


@jax_op("donation_test::put_page")
def put_page(cache: jax.Array, page: jax.Array, index: jax.Array) -> jax.Array:
    """A kernel that writes one row of an aliased output."""
    call = pl.pallas_call(_put_page, out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype), input_output_aliases={2: 0})
    return call(index[None], page, cache)


def _writes_an_input(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] * 3


@jax_op("donation_test::triple_first")
def triple_first(x: jax.Array, y: jax.Array) -> jax.Array:
    """Only outputs count, whatever becomes of the inputs' references."""
    return pl.pallas_call(_writes_an_input, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


@pytest.fixture
def xla():
    """torch_xla's device."""
    torch_xla = pytest.importorskip("torch_xla", reason="about xla tensors")
    gc.collect()
    return torch_xla.device()


def aliases(run) -> float:
    """How many results of what `run` executes lie in the memory of an argument; torch_xla counts when it compiles."""
    import torch_xla
    from torch_xla.debug import metrics

    torch_xla.sync(wait=True)
    metrics.clear_all()
    kept = run()
    torch_xla.sync(wait=True)
    del kept
    found = metrics.metric_data("InputOutputAliasCount")
    return found[1] if found else 0


GIVEN_AWAY = "deleted|HasValue"  # torch_xla's words for a buffer that is no more


def on(device, *shape) -> torch.Tensor:
    """Zeros that are on the device, not waiting to be made there."""
    import torch_xla

    x = torch.zeros(*shape, device=device)
    torch_xla.sync(wait=True)
    return x


@pytest.mark.xla
def test_a_donated_buffer_is_reused(xla):
    x = on(xla, 64, 64)
    assert aliases(lambda: bump(x)) == 1
    with pytest.raises(RuntimeError, match=GIVEN_AWAY):
        x.cpu()


@pytest.mark.xla
def test_a_donated_tensor_is_refused_afterwards(xla):
    """Our own calls say so; a new value makes it valid again."""
    x, c = on(xla, 8, 8), compiled(lambda x: x * 2)
    y = bump(x)
    for call in (bump, c):
        with pytest.raises(pure_backend.DonationError, match=r"argument 'x', a tensor of shape \(8, 8\), was donated"):
            call(x)
    x.copy_(y)
    assert c(x).unique().tolist() == [2]


@pytest.mark.xla
def test_a_donated_input_of_a_compiled_function(xla):
    c, x = compiled(lambda x: bump(x) * 2), on(xla, 8, 8)
    assert aliases(lambda: c(x)) == 1
    with pytest.raises(RuntimeError, match=GIVEN_AWAY):
        x.cpu()
    assert c(on(xla, 8, 8)).unique().tolist() == [2]


@pytest.mark.xla
def test_torch_xlas_own_marker(xla):
    def f(x):
        torch.ops.xla.dynamo_set_buffer_donor_(x, True)
        return x.sin() + 1

    c, x = compiled(f, fullgraph=True), on(xla, 8, 8)
    assert aliases(lambda: c(x)) == 1
    assert pure_backend.statistics().lowerings == 1
    assert c(on(xla, 8, 8)).unique().tolist() == [1]


@pytest.mark.xla
def test_a_cache_is_aliased_in_every_step(xla):
    """B12 https://github.com/tenstorrent/tt-xla/issues/4208"""

    def step(cache, position, row):
        cache.index_copy_(0, position, row[None])
        return cache.sum()

    c, cache, row = compiled(step, fullgraph=True), on(xla, 16, 4), torch.ones(4, device=xla)
    positions = [torch.tensor([i], device=xla) for i in range(3)]
    assert [aliases(lambda p=p: c(cache, p, row)) for p in positions] == [1, 0, 0]  # one executable serves all steps
    assert cache.sum().item() == 12


@pytest.mark.xla
def test_gradients_of_a_donating_function(xla):
    """The backward does not refer to memory that was given away."""
    x = on(xla, 8, 8).requires_grad_()
    held = (x + 0).detach()
    import torch_xla

    torch_xla.sync(wait=True)
    w = torch.full((8, 8), 2.0, device=xla, requires_grad=True)
    compiled(lambda x, w: (bump(x) * w).exp())(held, w).sum().backward()
    torch_xla.sync(wait=True)
    torch.testing.assert_close(w.grad.cpu(), torch.full((8, 8), 2.0).exp())


@pytest.mark.xla
def test_a_clone_does_not_give_away_its_source(xla):
    x = on(xla, 8, 8)
    bump(x.clone())
    import torch_xla

    torch_xla.sync(wait=True)
    assert x.cpu().unique().tolist() == [0]


def test_b02_the_mark_stays_with_the_argument(device):
    """B02 https://github.com/pytorch/xla/pull/7585"""

    def a(x):
        x.add_(1)
        return x

    r = compiled(a)(torch.zeros(4, device=device))
    d = bump(r.clone() + 0)
    c = compiled(lambda y: y * 100)
    assert c(r).tolist() == c(r).tolist() == [100] * 4
    assert r.tolist() == [1] * 4
    assert c(d).tolist() == c(d).tolist() == [200] * 4


@pytest.mark.parametrize("arrangement", ["one", "overlapping", "apart"])
def test_b03_one_buffer_given_several_times(arrangement, device):
    """B03 https://github.com/jax-ml/jax/issues/9635"""

    def update(k, v, extra):
        k.add_(1)
        v[:2].add_(1)
        return extra.sum()

    if arrangement == "overlapping" and device.type == "xla":
        x = torch.zeros(4, device=device)
        assert compiled(update)(x, x[:2], x).item() == 6
        return

    def make():
        x = torch.zeros(4)
        return {"one": (x, x, x), "overlapping": (x, x[:2], x), "apart": (x, torch.zeros(4), x)}[arrangement]

    agree(update, make, device=device)


def test_b04_memory_that_is_of_no_use(device):
    """B04 https://github.com/jax-ml/jax/issues/9675"""
    x = torch.ones(8, device=device) * 3
    assert cast(x).float().tolist() == [3] * 8


def test_b06_only_outputs_count(device):
    """B06 https://github.com/jax-ml/jax/issues/24656"""
    x, y = torch.ones(8, 128, device=device), torch.zeros(8, 128, device=device)
    assert triple_first(x, y).cpu().unique().tolist() == [3]
    assert x.cpu().unique().tolist() == [1] and y.cpu().unique().tolist() == [0]


@pytest.mark.parametrize("compile_it", [False, True])
def test_b07_a_partial_write_keeps_the_rest(compile_it, device):
    """B07 https://github.com/pytorch/helion/pull/2838"""

    def f(cache, page, index):
        cache.copy_(put_page(cache, page, index))
        return cache

    make = lambda: (torch.arange(32.0).reshape(4, 8), torch.zeros(8), torch.tensor(2))  # noqa: E731
    if compile_it:
        agree(f, make, device=device)
    got = f(*(a.to(device) for a in make())).cpu()
    assert got[2].unique().tolist() == [0]
    assert torch.equal(got[[0, 1, 3]], make()[0][[0, 1, 3]])


def test_b11_a_cache_that_is_replaced(device):
    """B11 https://github.com/tenstorrent/tt-xla/issues/4631"""

    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(16, 4))

        def forward(self, i, v):
            self.kv = self.kv.index_copy(0, i, v)
            return self.kv.sum()

    c = compiled(Cache().to(device))
    for t in range(8):
        out = c(torch.tensor([t], device=device), torch.ones(1, 4, device=device))
    assert out.item() == 32
    assert pure_backend.statistics().traces <= 2
