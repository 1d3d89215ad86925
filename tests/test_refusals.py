"""What cannot be compiled: eager, or a clear error that names the argument; inputs stay as they were."""

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
def test_odd_tensors_given_to_the_backend(name, caplog):
    """Sparse and quantized inputs: the nodes that read them run in eager, the rest is compiled."""
    make, target = ODD[name]
    odd, solid = make(), torch.ones(3)
    written, dense = assume_pure(graph(target), [odd, solid])(odd, solid)
    torch.testing.assert_close(dense, getattr(odd, target)())
    assert written is solid
    assert solid.tolist() == [2, 2, 2]
    assert f"argument 'odd' is a {name if name != 'sparse' else 'sparse_coo'}" in caplog.text.replace("sparse_csr", "csr")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*quantize")
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_are_named_in_the_error(name):
    """With `on_impure="error"`; nothing was written."""
    make, target = ODD[name]
    odd, solid = make(), torch.ones(3)
    with pytest.raises(pure_backend.ImpureGraphError, match="argument 'odd' is a"):
        assume_pure(graph(target), [odd, solid], options={"on_impure": "error"})(odd, solid)
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
    """Host reads and data-dependent shapes: in eager after a graph break, or between compiled partitions."""
    x = torch.tensor([0.0, 1.0, 2.0, 2.0])
    with torch._dynamo.config.patch(capture_scalar_outputs=capture, capture_dynamic_output_shape_ops=capture):
        agree(HOST_READS[name], lambda: (x.clone(),))


@torch.library.custom_op("pure_tests::explode", mutates_args=())
def explode(x: torch.Tensor) -> torch.Tensor:
    """Raises when it runs."""
    raise ValueError("boom")


explode.register_fake(torch.empty_like)


def test_a_refused_graph_leaves_inputs_alone():
    """An operator without a lowering, and no leave to run it in eager: an error before anything was written."""

    def f(x):
        x.add_(1)
        return explode(x * 2)

    x = torch.ones(3)
    with pytest.raises(pure_backend.ImpureGraphError, match=r"pure_tests\.explode.*test_refusals\.py"):
        compiled(f, options={"on_impure": "error"})(x)
    assert x.tolist() == [1, 1, 1]


def test_an_eager_node_may_raise():
    """Its own error reaches the caller; what was written before it stays written, as in eager, and modes are as before."""

    def f(x):
        x.add_(1)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return explode(x * 2)

    x = torch.ones(3)
    with pytest.raises(ValueError, match="boom"):
        compiled(f)(x)
    assert x.tolist() == [2, 2, 2]
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_the_graph_given_is_not_edited():
    """The backend works on a copy of the graph it is given."""
    gm = torch.fx.symbolic_trace(lambda x: (x.add(1).mul_(2),))
    before = str(gm.graph)
    call = assume_pure(gm, [torch.ones(3)])
    assert call(torch.ones(3))[0].tolist() == [4, 4, 4]
    assert str(gm.graph) == before
