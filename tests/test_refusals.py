"""What cannot be compiled: a clear error that names the argument, or eager; inputs stay as they were."""

import pytest
import torch
from oracle import agree, compiled

import pure_backend
from pure_backend.backend import assume_pure


def refusal(call, *args) -> pure_backend.PureBackendError:
    """The backend's own error, be it raised at the first call or, wrapped by Dynamo, while compiling."""
    with pytest.raises((pure_backend.PureBackendError, torch._dynamo.exc.BackendCompilerFailed)) as caught:
        call(*args)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, pure_backend.PureBackendError), repr(error)
    return error


def write_solid(ghost, solid):
    solid.add_(1)
    return ghost * 2, solid * 2


def test_second_device():
    """A `meta` tensor beside a CPU tensor."""
    ghost, solid = torch.ones(3, device="meta"), torch.ones(3)
    error = refusal(compiled(write_solid), ghost, solid)
    assert isinstance(error, pure_backend.DeviceError)
    assert "ghost" in str(error)
    assert solid.tolist() == [1, 1, 1]


def graph(target) -> torch.fx.GraphModule:
    """`odd, solid -> (solid.add_(1), target(odd))`, as no user's function reaches us: Dynamo leaves these to eager."""
    g = torch.fx.Graph()
    odd, solid = g.placeholder("odd"), g.placeholder("solid")
    written = g.call_method("add_", (solid, 1))
    g.output((written, g.call_method(target, (odd,))))
    return torch.fx.GraphModule(torch.nn.Module(), g)


ODD = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "to_dense"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dequantize"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*quantize")
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_given_to_the_backend(name):
    """Sparse and quantized inputs."""
    make, target = ODD[name]
    odd, solid = make(), torch.ones(3)
    error = refusal(lambda: assume_pure(graph(target), [odd, solid])(odd, solid))
    assert isinstance(error, pure_backend.UnsupportedOperatorError | pure_backend.DeviceError)
    assert "odd" in str(error)
    assert solid.tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*quantize")
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_given_by_a_user(name):
    """Dynamo leaves them to eager: the value is eager's."""
    make, target = ODD[name]

    def f(odd, x):
        return getattr(odd, target)() + x

    torch.testing.assert_close(compiled(f)(make(), torch.ones(3)), f(make(), torch.ones(3)))


def test_unknown_option():
    """A `TypeError` that lists the valid options."""
    with pytest.raises((TypeError, torch._dynamo.exc.BackendCompilerFailed), match="no_such_option") as caught:
        compiled(lambda x: x * 2, options={"no_such_option": 1})(torch.ones(2))
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, TypeError)


HOST_READS = {
    "item": lambda x: x * x.sum().item(),
    "int": lambda x: x + int(x[0]),
    "branch": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "tolist": lambda x: x * x.tolist()[1],
    "nonzero": lambda x: x[x.nonzero()[:, 0]] * 2,
    "mask": lambda x: x[x > 1] * 2,
    "masked_select": lambda x: x.masked_select(x > 1).sum() * x,
    "unique": lambda x: x.unique() * 2,
    "repeat_interleave": lambda x: x.sin().repeat_interleave(x.long()) * 2,
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long()) * 2,
    "bincount": lambda x: x.long().bincount() * 2,
    "numpy": lambda x: x + torch.from_numpy(x.numpy().copy()),
}


@pytest.mark.parametrize("capture", [False, True], ids=["break", "captured"])
@pytest.mark.parametrize("name", HOST_READS)
def test_data_dependent_values(name, capture):
    """Host reads and data-dependent shapes: eager after a graph break; captured, an error that names the operator."""
    x = torch.tensor([0.0, 1.0, 2.0, 2.0])
    with torch._dynamo.config.patch(capture_scalar_outputs=capture, capture_dynamic_output_shape_ops=capture):
        try:
            agree(HOST_READS[name], lambda: (x.clone(),))
        except pure_backend.UnsupportedOperatorError as error:
            assert capture and "test_refusals.py" in str(error)


def test_failure_inside_leaves_inputs_alone():
    """An operator without a lowering: an error before anything was written."""

    @torch.library.custom_op("pure_tests::explode", mutates_args=())
    def explode(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    explode.register_fake(torch.empty_like)

    def f(x):
        y = explode(x * 2)
        x.add_(1)
        return y

    x = torch.ones(3)
    with pytest.raises(pure_backend.UnsupportedOperatorError, match=r"pure_tests\.explode"):
        compiled(f)(x)
    assert x.tolist() == [1, 1, 1]


def test_the_graph_given_is_not_edited():
    """The backend works on a copy of the graph it is given."""
    gm = torch.fx.symbolic_trace(lambda x: (x.add(1).mul_(2),))
    before = str(gm.graph)
    call = assume_pure(gm, [torch.ones(3)])
    assert call(torch.ones(3))[0].tolist() == [4, 4, 4]
    assert str(gm.graph) == before
