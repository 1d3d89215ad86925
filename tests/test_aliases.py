"""Outputs that alias: an input, a view of one, each other. `agree` compares objects, storages and layouts."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from oracle import agree, compiled


def matrix() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


ALIASES = {
    "the input": lambda x: x,
    "the input twice": lambda x: (x, x),
    "input and result": lambda x: (x, x * 2),
    "detach": lambda x: (x.detach(), x * 1),
    "view": lambda x: x.view(2, 6),
    "row": lambda x: (x[1], x.sum()),
    "transpose": lambda x: (x.t(), x + 1),
    "slice of slice": lambda x: x[1:][:, ::2],
    "expand": lambda x: x[None].expand(2, 3, 4),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 5),
    "contiguous": lambda x: (x.contiguous(), x.t().contiguous()),
    "to": lambda x: (x.to(torch.float32), x.float(), x.to(x.device)),
    "reshape": lambda x: (x.reshape(-1), x.t().reshape(-1)),
    "alias and clone": lambda x: (x.view(-1), x.clone()),
    "two views of one intermediate": lambda x: two_views(x * 2),
    "intermediate and its view": lambda x: with_view(x * 2),
    "intermediate twice": lambda x: [x * 2] * 2,
    "view of an intermediate only": lambda x: (x * 2).t()[1:],
    "pieces": lambda x: (x * 2).chunk(2, 1),
    "pieces of the input": lambda x: x.unbind(0),
    "detach of an intermediate": lambda x: with_detach(x * 2),
    "written input": lambda x: written(x),
    "view of a written input": lambda x: (x.add_(1).t(), x[0]),
    "squeeze of nothing": lambda x: x.squeeze(),
    "narrow to all": lambda x: x.narrow(0, 0, 3),
    "chain of no-ops": lambda x: x.view(3, 4)[:].expand(3, 4).contiguous(),
    "dropout in eval": lambda x: torch.nn.functional.dropout(x, 0.5, False),
    "identity module": lambda x: torch.nn.Identity()(x),
    "nested": lambda x: {"a": [x, (x[0],)], "b": x.view(-1)},
    "empty view": lambda x: x[3:],
    "bits": lambda x: x.view(torch.int32),
}


def two_views(y):
    return y.view(-1), y.t()


def with_view(y):
    return y, y[1:]


def with_detach(y):
    return y, y.detach()


def written(x):
    y = x.mul_(2)
    return y, x, y * 1


@pytest.mark.parametrize("name", ALIASES)
def test_outputs_alias_as_in_eager(name, device):
    """Identity, shared storage, offset and strides."""
    agree(ALIASES[name], lambda: (matrix(),), device=device)


GRADIENT = [name for name in ALIASES if "written" not in name and name != "bits"]


@pytest.mark.parametrize("name", GRADIENT)
def test_aliases_carry_gradients(name):
    """The same with a differentiable input."""
    agree(ALIASES[name], lambda: (matrix().requires_grad_(),), grad=True)


def test_write_to_an_aliasing_output_reaches_the_input(device):
    """What the alias is for."""
    x = matrix().to(device)
    row, total = compiled(lambda x: (x[1], x.sum()))(x)
    row.zero_()
    assert x[1].tolist() == [0, 0, 0, 0]
    assert total.item() == 66


def test_write_to_a_result_leaves_the_input_alone(device):
    """A fresh result shares memory with nothing, whatever the runtime re-uses."""
    x = matrix().to(device)
    f = compiled(lambda x: (x * 1, x + 0, x.clone(), x.t().reshape(12), torch.cat([x])))
    first, second = f(x), f(x)
    for y in first:
        y.fill_(-1)
    assert x.cpu().equal(matrix())
    assert all((y >= 0).all() for y in second)


def test_results_outlive_inputs_and_model(device):
    """Memory of a result belongs to the result."""
    results = []
    for i in range(4):
        x = torch.full((64, 64), float(i), device=device)
        results.append(compiled(lambda x: x * 2 + 1)(x))
        del x
        torch._dynamo.reset()
    for i, y in enumerate(results):
        assert (y == 2 * i + 1).all()


def test_inputs_freed_or_replaced_between_calls(device):
    """No stale view of a tensor that has gone, or whose storage was replaced."""
    c = compiled(lambda x, w: x * w)
    w = torch.ones(3, device=device)
    for i in range(6):
        x = torch.full((3,), float(i), device=device)
        assert c(x, w).tolist() == [i] * 3
        w.add_(1)
        w.mul_(0).add_(1)
    w.data = torch.full((3,), 5.0, device=device)
    assert c(x, w).tolist() == [25] * 3
    w.set_(torch.full((3,), 7.0, device=device))
    assert c(x, w).tolist() == [35] * 3
    w.data = torch.arange(6.0, device=device)[::2]
    assert c(x, w).tolist() == [0, 10, 20]


def test_results_are_ordinary_tensors():
    """They can be pickled, copied, resized, handed to numpy, and written to."""
    y = compiled(lambda x: x * 2)(matrix())
    twice = matrix() * 2
    assert (y.numpy() == twice.numpy()).all()
    assert pickle.loads(pickle.dumps(y)).equal(twice)
    assert copy.deepcopy(y).equal(twice)
    assert y.t().contiguous().view(-1).equal(twice.t().reshape(-1))
    assert torch.from_dlpack(y).equal(twice)
    y.resize_(2, 2)
    assert y.tolist() == [[0, 2], [4, 6]]


def test_nothing_is_kept_for_each_call():
    """Inputs, results and saved values of a step are gone after it."""
    import jax

    c = compiled(lambda x, w: (x @ w).tanh().sum())
    w = torch.ones(4, 4, requires_grad=True)
    counts = []
    for _ in range(12):
        c(torch.ones(2, 4), w).backward()
        gc.collect()
        counts.append((len(jax.live_arrays()), sum(type(o) is torch.Tensor for o in gc.get_objects())))
    assert counts[3] == counts[-1], counts


def test_forward_without_backward_keeps_nothing():
    """A graph that is dropped frees what it saved."""
    c = compiled(lambda x, w: (x @ w).tanh() @ w)
    w = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(2, 4)
    y = c(x, w)
    dead = weakref.ref(x)
    del x, y
    gc.collect()
    assert dead() is None
