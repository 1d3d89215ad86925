"""A training step writes a parameter where it lies, unless that memory is the parameter's alone."""

import ctypes
import gc

import jax
import numpy as np
import pytest
import torch
from torch import nn

from pure_backend import TrainStep, _compat
from pure_backend.jax_bridge.arrays import ArrayViews


class Model(nn.Module):
    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return (x @ self.weight).pow(2).mean()


def steps(model, count, optimizer=torch.optim.Adam):
    """Train, and say how much the last step copied."""
    step = TrainStep(model, optimizer(model.parameters(), lr=0.1), None)
    for _ in range(count):
        step(torch.ones(4, 16))
    return step


def initial():
    return torch.linspace(-1, 1, 256).reshape(16, 16)


def numpy_view(model, _):
    return model.weight.detach().numpy()


def numpy_of_a_slice(model, _):
    return model.weight.detach()[2:5, 1].numpy()


def dlpack_capsule(model, _):
    capsule = torch.utils.dlpack.to_dlpack(model.weight.detach())
    return Held(capsule, lambda: torch.from_dlpack(capsule))


def numpy_by_dlpack(model, _):
    return np.from_dlpack(model.weight.detach())


def jax_by_dlpack(model, _):
    return jax.dlpack.from_dlpack(model.weight.detach())


def untyped_storage(model, _):
    storage = model.weight.untyped_storage()
    return Held(storage, lambda: torch.tensor(storage.tolist(), dtype=torch.uint8).view(torch.float32).reshape(16, 16))


def typed_storage(model, _):
    storage = model.weight.data.storage()
    return Held(storage, lambda: torch.tensor(storage.tolist()).reshape(16, 16))


def detached(model, _):
    return model.weight.detach()


def tensor_set_to_its_storage(model, _):
    return torch.empty(0).set_(model.weight.untyped_storage(), 0, (16, 16), (16, 1))


def reversed_view(model, _):
    return model.weight.detach().t()


class Held:
    """What holds memory, and how to see it."""

    def __init__(self, holder, read):
        self.holder, self.read = holder, read


def seen(held):
    value = held.read() if isinstance(held, Held) else held
    return np.asarray(value)


HOLDERS = [
    numpy_view,
    numpy_of_a_slice,
    dlpack_capsule,
    numpy_by_dlpack,
    jax_by_dlpack,
    untyped_storage,
    typed_storage,
    detached,
]
HOLDERS += [tensor_set_to_its_storage, reversed_view]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("after", [0, 1, 2], ids=lambda n: f"after {n} steps")
@pytest.mark.parametrize("hold", HOLDERS, ids=lambda f: f.__name__)
def test_what_was_taken_of_a_parameter_shows_its_new_values(hold, after):
    """Also of memory that an earlier step gave the parameter."""
    model = Model(initial())
    step = steps(model, after)
    held = hold(model, None)
    step(torch.ones(4, 16))
    assert step.bytes_copied >= model.weight.nbytes
    step(torch.ones(4, 16))
    eager = hold(Model(model.weight.detach().clone()), None)
    np.testing.assert_array_equal(seen(held), seen(eager))
    del held, eager
    gc.collect()


def from_numpy(tmp_path):
    array = initial().numpy().copy()
    return torch.from_numpy(array), lambda: array


def from_aligned_numpy(tmp_path):
    """Where XLA could use the memory as it is."""
    memory = np.zeros(256 + 16, np.float32)
    array = memory[-memory.ctypes.data % 64 // 4 :][:256].reshape(16, 16)
    array[:] = initial()
    return torch.from_numpy(array), lambda: array


def from_buffer(tmp_path):
    memory = bytearray(initial().numpy().tobytes())
    return torch.frombuffer(memory, dtype=torch.float32).reshape(16, 16), lambda: np.frombuffer(memory, np.float32).reshape(
        16, 16
    )


def from_file(tmp_path):
    path = tmp_path / "weights"
    initial().numpy().tofile(path)
    tensor = torch.from_file(str(path), shared=True, size=256).reshape(16, 16)
    return tensor, lambda: np.fromfile(path, np.float32).reshape(16, 16)


def from_memory_map(tmp_path):
    array = np.memmap(tmp_path / "weights", np.float32, "w+", shape=(16, 16))
    array[:] = initial()
    return torch.from_numpy(array), lambda: array


def from_shared_memory(tmp_path):
    tensor = initial().share_memory_()
    other = torch.empty(0).set_(tensor.untyped_storage(), 0, (16, 16), (16, 1)).numpy()
    return tensor, lambda: other


SOURCES = [from_numpy, from_aligned_numpy, from_buffer, from_file, from_memory_map, from_shared_memory]


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_memory_that_a_parameter_was_given_shows_its_new_values(source, tmp_path):
    tensor, read = source(tmp_path)
    model = Model(tensor)
    pointer = model.weight.data_ptr()
    for count in (1, 2):
        step = steps(model, count)
        assert step.bytes_copied >= model.weight.nbytes
        assert model.weight.data_ptr() == pointer
        np.testing.assert_array_equal(read(), model.weight.detach().numpy().copy())


def test_shared_memory_stays_shared_without_another_tensor():
    """Its other owners are other processes, which nobody counts."""
    model = Model(initial()).share_memory()
    steps(model, 2)
    assert model.weight.is_shared()


def test_memory_of_its_own_is_not_copied():
    """Neither what torch allocated, nor what a step gave."""
    model = Model(initial())
    assert steps(model, 3).bytes_copied == 0
    array = model.weight.detach().numpy()
    step = steps(model, 1)
    assert step.bytes_copied == array.nbytes
    del array
    gc.collect()


def test_copied_and_moved_parameters_train_alike():
    ours, theirs = Model(initial()), Model(torch.from_numpy(initial().numpy().copy()))
    steps(ours, 4), steps(theirs, 4)
    assert ours.weight.equal(theirs.weight)


def test_donate_false_moves_nothing():
    model = Model(initial())
    address = model.weight.data_ptr()
    seen = (ctypes.c_float * 256).from_address(address)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), None, donate=False)
    for _ in range(2):
        step(torch.ones(4, 16))
        assert model.weight.data_ptr() == address and list(seen) == model.weight.flatten().tolist()


def test_buffers_and_states_are_owned_alike():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

        def forward(self, x):
            return self.norm(self.inner(x)).pow(2).mean() + self.inner(x).mean()

    model = Counting()
    step = steps(model, 1)
    mean, state = model.norm.running_mean.numpy(), step.optimizer.state[model.inner.weight]["exp_avg"].numpy()
    for _ in range(2):
        step(torch.randn(4, 16))
        assert step.bytes_copied >= mean.nbytes + state.nbytes
        np.testing.assert_array_equal(mean, model.norm.running_mean.clone().numpy())
        np.testing.assert_array_equal(state, step.optimizer.state[model.inner.weight]["exp_avg"].clone().numpy())


# What is kept by address: views of tensors whose memory changes under them.


def aligned(*shape, value=1.0):
    return torch.full(shape, value)


def set_to_other_storage(x):
    x.set_(torch.full((8, 8), 5.0))


def set_data(x):
    x.data = torch.full((8, 8), 5.0)


def resize_away_and_back(x):
    x.resize_(0)
    x.untyped_storage().resize_(0)
    x.resize_(8, 8).fill_(5.0)


def storage_freed_and_filled(x):
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(8 * 8 * 4)
    x.fill_(5.0)


def other_shape_at_the_same_address(x):
    x.resize_(4, 16).fill_(5.0)


def other_dtype_at_the_same_address(x):
    x.fill_(5.0)
    x.data = x.data.view(torch.int32)


def other_stride_at_the_same_address(x):
    x.copy_(torch.arange(64.0).reshape(8, 8)).t_()


def storages_swapped(x):
    other = torch.full((8, 8), 5.0)
    mine, theirs = x.untyped_storage(), other.untyped_storage()
    x.set_(theirs, 0, (8, 8), (8, 1))
    other.set_(mine, 0, (8, 8), (8, 1))


CHANGES = [set_to_other_storage, set_data, resize_away_and_back, storage_freed_and_filled, other_shape_at_the_same_address]
CHANGES += [other_stride_at_the_same_address, storages_swapped]
OTHER_DTYPES = [other_dtype_at_the_same_address]


@pytest.mark.parametrize("change", CHANGES + OTHER_DTYPES, ids=lambda f: f.__name__)
def test_a_view_shows_what_its_tensor_shows(change):
    views, x = ArrayViews(), aligned(8, 8)
    views(x)
    change(x)
    with _compat.x64():
        array = views(x)
    assert array.dtype == x.detach().numpy().dtype
    np.testing.assert_array_equal(np.asarray(array), x.numpy())


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_compiled_function_reads_what_its_argument_shows(change):
    c, x = torch.compile(lambda x: x * 2 + 1, backend="assume_pure"), aligned(8, 8)
    for _ in range(2):
        assert c(x).equal(x * 2 + 1)
        change(x)
        assert c(x).equal(x * 2 + 1)


def test_memory_that_is_allocated_again_at_an_address():
    """Another tensor, of another shape, where a dead one lay."""
    c = torch.compile(lambda x: x.sum(), backend="assume_pure", dynamic=False)
    for i in range(40):
        shape = [(64, 64), (16, 256), (4096,)][i % 3]
        x = torch.full(shape, float(i))
        assert c(x) == 4096.0 * i
        del x
        gc.collect(0)
