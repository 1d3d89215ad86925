"""A fault of a pass leaves its node, or the graph, to eager with a reason; nothing raw reaches the user."""

import jax
import jax.numpy as jnp
import pytest
import torch
from oracle import agree, compiled, same

import pure_backend
from pure_backend.backend import assume_pure
from pure_backend.jax_bridge.lowerings import registry
from pure_backend.jax_bridge.trace import Walker

REFUSE = {"options": {"on_impure": "error"}}


@jax.custom_vjp
def _no_backward(x):
    return jnp.sin(x)


def _broken(residuals, cotangent):
    raise KeyError("no such residual")


_no_backward.defvjp(lambda x: (jnp.sin(x), x), _broken)

BROKEN = {
    "lowering": lambda site, x: x["nothing"],
    "arithmetic": lambda site, x: 1 // 0,
    "shape": lambda site, x: x[..., None],
    "assertion": lambda site, x: (_ for _ in ()).throw(AssertionError("odd")),
    "differentiation": lambda site, x: _no_backward(x),
    "compilation": lambda site, x: jax.lax.platform_dependent(x, tpu=jnp.sin),
}


@pytest.fixture
def broken(request, monkeypatch):
    """Another lowering of `sin`."""
    monkeypatch.setitem(registry._LOWERINGS, "sin", BROKEN[request.param])
    return request.param


def layers(x, w):
    for _ in range(3):
        x = (x @ w).sin().mul(2).cos() + x
    return x


def make_args():
    return torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_(), torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()


@pytest.mark.usefixtures("as_users_see_it")
@pytest.mark.parametrize("broken", BROKEN, indirect=True)
def test_the_node_runs_in_eager(broken, device, caplog):
    """Values and gradients are eager's, the rest is compiled, and the log names operator and line."""
    agree(layers, make_args, device=device, grad=True, pure=True, options={"min_partition_size": 1})
    assert "sin (fault) at" in caplog.text and "test_failing_passes.py" in caplog.text
    assert "cos (fault)" not in caplog.text and "matmul (fault)" not in caplog.text


@pytest.mark.usefixtures("as_users_see_it")
@pytest.mark.parametrize("broken", BROKEN, indirect=True)
def test_the_user_may_ask_for_the_error(broken):
    with pytest.raises(pure_backend.ImpureGraphError, match=r"(?s)sin \(fault\) at .*test_failing_passes.py.*report it"):
        compiled(layers, **REFUSE)(*make_args())


@pytest.mark.parametrize("broken", BROKEN, indirect=True)
def test_tests_see_it(broken):
    with pytest.raises(Exception) as caught:
        compiled(layers)(*make_args())
    assert not isinstance(caught.value, pure_backend.ImpureGraphError)


@pytest.mark.usefixtures("as_users_see_it")
@pytest.mark.parametrize("broken", ["differentiation"], indirect=True)
def test_without_gradients_nothing_fails(broken):
    with torch.no_grad():
        agree(layers, lambda: tuple(t.detach() for t in make_args()), **REFUSE)


@pytest.mark.usefixtures("as_users_see_it")
def test_a_fault_at_no_node(monkeypatch, caplog):
    """The whole graph runs in eager."""
    monkeypatch.setattr(Walker, "run", lambda *args: [][0])
    agree(layers, make_args, grad=True)
    assert "a compiled graph runs in eager: the graph (fault): IndexError" in caplog.text


@pytest.mark.usefixtures("as_users_see_it")
@pytest.mark.parametrize("broken", ["lowering"], indirect=True)
def test_inside_a_body(broken, caplog):
    """The operator that owns the body is left to eager; a checkpoint opens, so that only the node is."""

    def f(x, w):
        y = torch.cond(x.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos(), (x,))
        return torch.utils.checkpoint.checkpoint(layers, y, w, use_reentrant=False)

    agree(f, make_args, grad=True)
    assert "cond (fault)" in caplog.text and "sin (fault)" in caplog.text


class TestErrorsOnFakes:
    """A node that raises on fake tensors: eager decides."""

    def test_a_mistake_of_the_user(self):
        """Eager's own error, and the next call is compiled as if nothing had been."""
        call = assume_pure(torch.fx.symbolic_trace(lambda x, w: ((x @ w).cos() + 1,)), [])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
                call(torch.ones(2, 3), torch.ones(2, 3))
        before = pure_backend.statistics().calls
        same(((torch.ones(2, 3) @ torch.ones(3, 2)).cos() + 1), call(torch.ones(2, 3), torch.ones(3, 2))[0])
        assert pure_backend.statistics().calls == before + 1

    @pytest.mark.usefixtures("as_users_see_it")
    def test_a_fault_of_the_fakes(self, caplog):
        """Eager does not raise: the node is left to it."""

        def only_real(x):
            if isinstance(x, torch._subclasses.FakeTensor):
                raise NotImplementedError("no fake kernel")
            return x.sin()

        g = torch.fx.Graph()
        x = g.placeholder("x")
        wide = g.call_function(torch.add, (x, 1))
        odd = g.call_function(only_real, (wide,))
        g.output((g.call_function(torch.cos, (odd,)), wide))
        gm = torch.fx.GraphModule(torch.nn.Module(), g)
        call = assume_pure(gm, [], options={"min_partition_size": 1})
        x = torch.linspace(0, 1, 3)
        for calls in (0, 1, 2):
            for want, got in zip(gm(x), call(x), strict=True):
                same(want, got)
            assert (pure_backend.statistics().calls > 0) == (calls > 0)
        assert "(raises)" in caplog.text and "no fake kernel" in caplog.text
