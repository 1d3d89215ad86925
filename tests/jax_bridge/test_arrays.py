"""The law of the border: arrays and tensors share memory, and a view lives as long as its tensor stays where it is."""

import gc
import weakref

import jax
import numpy as np
import pytest
import torch

from pure_backend import _compat
from pure_backend.jax_bridge.arrays import ArrayViews, to_tensor
from pure_backend.jax_bridge.avals import to_jax_dtype
from pure_backend.jax_bridge.memory import array_over, memory_release

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
DTYPES += [torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture
def views():
    with _compat.x64():
        yield ArrayViews()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_shares_memory(views, dtype):
    x = torch.ones(4, 3).to(dtype)
    array = views(x)
    assert array.dtype == to_jax_dtype(dtype)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    back = to_tensor(array)
    assert back.dtype == dtype
    if back.data_ptr() == x.data_ptr():
        x.zero_()
        assert not back.view(torch.uint8).any()
    else:
        assert "float8" in str(dtype)  # which jaxlib has not in DLPack, up to 0.10.2
        assert back.view(torch.uint8).equal(x.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 5, 1)])
def test_odd_shapes(views, shape):
    x = torch.full(shape, 2.0)
    assert views(x).shape == shape
    assert to_tensor(views(x)).equal(x)


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x[0, 1], lambda x: x[:1].expand(4, 6)]
)
def test_strided_tensors_are_copied_and_not_kept(views, view):
    x = torch.arange(24.0).reshape(4, 6)
    assert to_tensor(views(view(x))).equal(view(x))
    assert len(views) == 0


def test_a_view_is_made_once(views):
    x = torch.ones(3)
    assert views(x) is views(x)
    assert len(views) == 1


MOVES = {
    "set_data": lambda x: setattr(x, "data", torch.zeros(3)),
    "other shape": lambda x: x.resize_(1, 3),
    "shorter": lambda x: x.resize_(2),
    "set_": lambda x: x.set_(torch.zeros(3)),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_tensor_that_moved_gets_a_new_view(views, name):
    x = torch.ones(3)
    views(x)
    MOVES[name](x)
    assert to_tensor(views(x)).equal(x)
    assert views(x).shape == tuple(x.shape)


def test_views_die_with_their_tensors(views):
    tensors = [torch.ones(3) for _ in range(10)]
    for tensor in tensors:
        views(tensor)
    assert len(views) == 10
    del tensor, tensors
    gc.collect()
    assert len(views) == 0


def test_memory_is_free_when_its_tensor_dies(views):
    x = torch.ones(1000)
    views(x)
    memory = x.untyped_storage()._weak_ref()
    del x
    assert torch.UntypedStorage._expired(memory)


def test_a_view_changes_nothing_about_its_tensor(views):
    x = torch.ones(3)
    views(x)
    x.resize_(1000)  # refused for ever after `x.numpy()`
    assert views(x).shape == (1000,)


def test_xla_leaves_it_to_python_to_free_memory():
    """XLA frees on a thread of its own: if that waited for the GIL, a process that ends meanwhile would be aborted."""
    memory = np.zeros(64)
    memory = memory[-memory.ctypes.data % 64 // 8 :][:8]
    with _compat.x64():
        array = array_over(memory, jax.devices("cpu")[0])
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    alive = weakref.ref(memory)
    del memory, array
    assert alive() is not None
    memory_release()()
    assert alive() is None


def test_movable(views):
    x, y, z = torch.ones(3), torch.ones(4), torch.ones(3)[1:]
    views(x)
    assert views.movable([x, y, z]) == [True, True, False]
    other = x.detach()
    assert views.movable([x]) == [False]
    del other
    assert views.move(x, jax.numpy.zeros(3, "float32")) and not x.any()
    assert views.movable([x]) == [True]
    assert not views.move(y.view(2, 2).t(), jax.numpy.zeros((2, 2), "float32"))


def test_conjugated_and_negated(views):
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert to_tensor(views(z.conj())).equal(z.conj().resolve_conj())
    assert to_tensor(views(z.conj().imag)).equal(-z.imag)


def test_results_stay_alive_without_their_array():
    tensors = [to_tensor(jax.numpy.full((1000,), float(i))) for i in range(50)]
    gc.collect()
    assert [t[0].item() for t in tensors] == list(range(50))
