"""Two calls that a guard or a key takes for equal compute the same."""

import copy
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from oracle import compiled
from torch import nn

import pure_backend
from pure_backend import TrainStep, call_jax, jax_op, scan_layers
from pure_backend.calls.guard import Guard
from pure_backend.calls.signature import signature
from pure_backend.ir.exact import Same, exact
from pure_backend.ir.geometry import Placed
from pure_backend.jax_bridge.compile import settings

TELLING = [1, 1.0, True, 0, 0.0, -0.0, False, float("nan"), "1", None, 1 + 0j, complex(0.0, -0.0), 0j, (1,), (1.0,), (True,)]
TELLING += [np.float32(1), np.float64(1), np.int64(1), frozenset([1]), frozenset([1.0])]


@dataclasses.dataclass(frozen=True)
class Config:
    scale: object


TELLING += [Config(1), Config(1.0), Config(0.0), Config(-0.0)]


def test_constants_that_differ_have_different_keys():
    keys = list(map(exact, TELLING))
    assert len(set(keys)) == len(keys)
    assert keys == list(map(exact, copy.deepcopy(TELLING)))
    with pytest.raises(TypeError):
        exact([1])


def test_objects_are_told_apart_by_identity():
    a, b = np.int64(1), np.float32(1)
    assert a == b and Same(a) != Same(b) and Same(a) == Same(a)


# Which memory the arguments show.


def negate_first(p, q):
    p.neg_()
    return p - q


def add_views(p, q):
    p.view(2, 2)[0] += 1
    return q * 2, p.sum()


def write_both(p, q):
    p.mul_(2)
    q.add_(1)
    return p + q


WINDOWS = [((0, 4), (2, 6)), ((0, 4), (1, 5)), ((0, 4), (4, 8)), ((2, 6), (0, 4)), ((0, 4), (0, 4)), ((1, 5), (3, 7))]


@pytest.mark.parametrize("f", [negate_first, add_views, write_both], ids=lambda f: f.__name__)
@pytest.mark.parametrize("windows", [WINDOWS, WINDOWS[::-1]], ids=["forth", "back"])
def test_where_arguments_overlap_counts(f, windows):
    c = compiled(f)
    for (a, b), (d, e) in (*windows, windows[0]):
        ours, theirs = torch.arange(8.0) + 1, torch.arange(8.0) + 1
        got, want = c(ours[a:b], ours[d:e]), f(theirs[a:b], theirs[d:e])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert ours.equal(theirs)


def test_equal_overlaps_share_a_program():
    """Anywhere in the memory: a window that slides makes no new program."""
    c = compiled(negate_first)
    for start in range(5):
        memory = torch.arange(16.0)
        c(memory[start : start + 4], memory[start + 2 : start + 6])
    assert pure_backend.statistics().traces == 1


def test_inputs_that_nobody_writes_may_overlap_in_any_way():
    def f(x, y, buffer):
        buffer += 1
        return x - y

    c, data = compiled(f), torch.arange(16.0)
    for i, j in ((0, 3), (2, 4), (5, 5)):
        assert c(data[i : i + 4], data[j : j + 4], torch.zeros(1)).equal(data[i : i + 4] - data[j : j + 4])
    assert pure_backend.statistics().traces == 1


@pytest.mark.parametrize("share", [torch.from_numpy, lambda a: torch.from_dlpack(a)], ids=["numpy", "dlpack"])
def test_memory_that_two_storages_show(share, caplog):
    """Storages of their own do not make arguments independent."""
    c = compiled(negate_first)
    for shift in (8, 0, 1, 2, 8):
        ours, theirs = np.arange(16, dtype=np.float32), np.arange(16, dtype=np.float32)
        got = c(share(ours)[:4], share(ours[shift:])[:4])
        want = negate_first(share(theirs)[:4], share(theirs[shift:])[:4])
        assert got.equal(want) and (ours == theirs).all()
    assert "through another storage" in caplog.text


def test_as_strided_counts_from_the_beginning_of_the_storage():
    def f(x):
        return torch.as_strided(x, (2,), (1,), 3) * 2

    c, memory = compiled(f), torch.arange(8.0)
    for start in (0, 1, 2, 0, 4):
        assert c(memory[start : start + 4]).equal(f(memory[start : start + 4]))


def test_written_overlaps_of_a_written_view_of_the_second_argument(device):
    def f(p, q, r):
        q.mul_(2)
        return p + r

    c = compiled(f)
    apart = [torch.ones(4, device=device) for _ in range(3)]
    assert c(*apart).tolist() == [2.0] * 4
    memory = torch.ones(6, device=device)
    assert c(torch.ones(4, device=device), memory[:4], memory[2:]).tolist() == [3.0, 3.0, 2.0, 2.0]
    assert c(torch.ones(4, device=device), memory[2:], memory[:4]).tolist() == [3.0, 3.0, 5.0, 5.0]


# What sort of tensors the arguments are.


def sorts():
    z = torch.tensor([1 + 2j, 3 - 1j])
    with torch.inference_mode():
        made_in_inference = torch.tensor([1 + 2j, 3 - 1j])
    return [z, z.conj(), z.clone().requires_grad_(), made_in_inference, nn.Parameter(z), z.to(torch.complex128), z[:1]]


def test_sorts_of_tensors_have_different_signatures():
    signatures = [signature([tensor]) for tensor in sorts()]
    assert len(set(signatures)) == len(signatures)
    for a, b in itertools.permutations(range(len(signatures)), 2):
        assert not Guard([sorts()[a]])([sorts()[b]])
    negated = torch.tensor([1 + 2j]).conj().imag
    assert signature([negated]) != signature([negated.resolve_neg()])


def test_conjugated_then_plain_arguments():
    def f(z):
        return z.resolve_conj(), z * 2

    c = compiled(f)
    for make in (lambda z: z, torch.conj, lambda z: z):
        z = make(torch.tensor([1 + 2j, 3 - 1j]))
        got, want = c(z), f(z)
        assert got[0].equal(want[0]) and got[1].equal(want[1])
        assert (got[0].data_ptr() == z.data_ptr()) == (want[0].data_ptr() == z.data_ptr())


@pytest.mark.parametrize("pair", list(itertools.permutations([0.0, -0.0, 1, 1.0, True], 2)), ids=str)
def test_scalars_of_a_signature(pair):
    a, b = pair
    assert signature([torch.ones(2), a]) != signature([torch.ones(2), b])
    assert not Guard([torch.ones(2), a])([torch.ones(2), b])
    nan = float("nan")
    assert signature([nan]) == signature([float("nan")]) and Guard([torch.ones(1), nan])([torch.ones(1), float("nan")])


# Modes.


JAX_FLAGS = {
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": not jax.config.jax_threefry_partitionable,
    "jax_softmax_custom_jvp": not jax.config.jax_softmax_custom_jvp,
    "jax_numpy_dtype_promotion": "strict",
    "jax_high_dynamic_range_gumbel": True,
}


@pytest.mark.parametrize("flag", JAX_FLAGS)
def test_settings_of_jax_are_part_of_every_key(flag):
    guard, seen, key = Guard([torch.ones(2)]), signature([torch.ones(2)]), settings()
    before = getattr(jax.config, flag)
    jax.config.update(flag, JAX_FLAGS[flag])
    try:
        assert not guard([torch.ones(2)]) and signature([torch.ones(2)]) != seen and settings() != key
    finally:
        jax.config.update(flag, before)
    assert guard([torch.ones(2)]) and signature([torch.ones(2)]) == seen and settings() == key


def test_deterministic_mode_is_asked_for_at_each_call():
    def f(x):
        return x.sum() + torch.are_deterministic_algorithms_enabled()

    c = compiled(f)
    assert c(torch.zeros(2)) == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert c(torch.zeros(2)) == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert c(torch.zeros(2)) == 0


# Static arguments.


@pytest.mark.parametrize("statics", list(itertools.permutations([1, 1.0, True], 3)), ids=str)
def test_static_arguments_of_call_jax_keep_their_types(statics):
    for static in statics:
        made = call_jax(lambda x, s: jnp.full(x.shape, s), (torch.ones(2), static))
        assert made.dtype == {int: torch.int64, float: torch.float64, bool: torch.bool}[type(static)]
        assert made.tolist() == [static, static]


def test_static_zeros_keep_their_signs():
    for zero in (0.0, -0.0, 0.0):
        (got,) = {float(v) for v in call_jax(lambda x, s: x / s, (torch.ones(2), zero))}
        assert got == (float("-inf") if str(zero).startswith("-") else float("inf"))
    for zero in (0.0, -0.0):
        nested = call_jax(lambda x, s: x / s["a"][0], (torch.ones(1), {"a": (zero,)}))
        assert nested.item() == np.copysign(np.inf, zero)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_static_nan_is_traced_once():
    for _ in range(4):
        assert call_jax(lambda x, s: x * s, (torch.ones(2), float("nan"))).isnan().all()
    assert pure_backend.statistics().traces == 1


@jax_op("faults::scaled")
def scaled(x: jax.Array, scale: float, steps: int = 1) -> jax.Array:
    return x / scale * steps


@jax_op("faults::either")
def either(x: jax.Array, flag: bool, count: int) -> jax.Array:
    return x + jnp.asarray(flag, x.dtype) + count


def test_static_arguments_of_operators():
    x = torch.ones(2)
    for zero in (0.0, -0.0, 0.0):
        assert scaled(x, zero).tolist() == [1 / float(np.float64(zero)) if zero else np.copysign(np.inf, zero)] * 2
    pure_backend.reset_statistics()
    for _ in range(4):
        assert scaled(x, float("nan")).isnan().all()
    assert pure_backend.statistics().traces == 1
    assert either(x, True, 1).tolist() == [3.0, 3.0] and either(x, True, 0).tolist() == [2.0, 2.0]


def _over(x, s):
    return x / s


def test_static_arguments_inside_of_compiled_functions():
    """Written in the code: between calls Dynamo's own guard takes -0.0 for 0.0."""
    plus = compiled(lambda x: (call_jax(_over, (x, 0.0)), scaled(x, 0.0), x / 0.0))
    minus = compiled(lambda x: (call_jax(_over, (x, -0.0)), scaled(x, -0.0), x / -0.0))
    for c, want in ((plus, np.inf), (minus, -np.inf)):
        assert [got.item() for got in c(torch.ones(1))] == [want] * 3


# Hyper-parameters and layers.


def test_a_sign_of_a_hyperparameter():
    """A learning rate of -0.0 turns the sign of a zero update."""

    def run(step_of):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = step_of(model, optimizer)
        found = []
        for rate in (0.0, -0.0, 0.0):
            optimizer.param_groups[0]["lr"] = rate
            with torch.no_grad():
                model.weight.fill_(-0.0)
            step(torch.ones(1, 1))
            found.append(torch.signbit(model.weight).item())
        return found

    def eager(model, optimizer):
        def step(x):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    assert run(lambda model, optimizer: TrainStep(model, optimizer, lambda model, x: model(x).sum())) == run(eager)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.scale = 1

    def forward(self, x, factor=1):
        return self.inner(x) * self.scale + torch.full((3,), factor, dtype=x.dtype) * (1 if factor is True else 2)


def test_a_layer_that_changed_is_captured_anew():
    layers = [Scaled().eval() for _ in range(2)]
    x = torch.randn(2, 3)

    def same(*extra):
        want = x
        for layer in layers:
            want = layer(want, *extra)
        torch.testing.assert_close(scan_layers(layers, x, *extra), want)

    same()
    for layer in layers:
        layer.scale = 3
    same()
    for extra in (1, True, 1.0):
        same(extra)
    for layer in layers:
        layer.inner[1].p = 0.0
        layer.inner[1].train()
    same()


def test_parameters_that_overlap_are_not_stepped_silently():
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.arange(6.0)
            self.a, self.b = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])

        def forward(self, x):
            return (x * self.a * self.b).sum()

    model = Overlapping()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(Exception, match="overlap in memory"):
        step(torch.ones(4))


def test_parameters_of_one_storage_are_stepped():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.arange(8.0)
            self.a, self.b = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
            self.memory = memory

        def forward(self, x):
            return (x * self.a * self.b).sum()

    ours, theirs = Flat(), Flat()
    step = TrainStep(ours, torch.optim.SGD(ours.parameters(), lr=0.1), None)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(2):
        step(torch.ones(4))
        optimizer.zero_grad()
        theirs(torch.ones(4)).backward()
        optimizer.step()
        torch.testing.assert_close(ours.memory, theirs.memory)


def test_placed_is_a_union():
    assert Placed(frozenset([1])) | Placed(frozenset([2]), frozenset([3])) == Placed(frozenset([1, 2]), frozenset([3]))
