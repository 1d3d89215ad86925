"""What only `xla` tensors have: donated buffers, torch_xla's own client, its default device."""

import logging

import jax
import jax.numpy as jnp
import pytest
import torch

import pure_backend
from pure_backend import jax_op

torch_xla = pytest.importorskip("torch_xla", reason="about xla tensors")
pytestmark = pytest.mark.xla


def compiled(f, **keywords):
    """`f` in one graph of the backend under test."""
    return torch.compile(f, backend="assume_pure", fullgraph=True, **keywords)


def on_device(*shape: int) -> torch.Tensor:
    """Zeros that lie on the device, and do not wait to be made there."""
    x = torch.zeros(*shape, device=torch_xla.device())
    torch_xla.sync(wait=True)
    return x


def _add(x):
    torch.ops.xla.dynamo_set_buffer_donor_(x, True)
    x += 1


def _put_row(x):
    torch.ops.xla.dynamo_set_buffer_donor_(x, True)
    x[1:3].add_(1)
    return x.sum()


def _returned(x):
    torch.ops.xla.dynamo_set_buffer_donor_(x, True)
    x.mul_(2).add_(1)
    return x


@pytest.mark.parametrize("f", [_add, _put_row, _returned])
def test_a_donated_buffer_that_is_written_is_valid_again(f):
    """torch_xla's pattern for a cache: every step donates it and writes it."""
    step, x, want = compiled(f), on_device(4, 8), torch.zeros(4, 8)
    for _ in range(3):
        step(x)
        torch_xla.sync()
        want = {_add: want + 1, _returned: want * 2 + 1}.get(f, torch.cat([want[:1], want[1:3] + 1, want[3:]]))
    assert torch.equal(x.cpu(), want)
    assert pure_backend.statistics().traces == 1


def test_a_cache_of_a_module():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(8, 4))

        def forward(self, row):
            torch.ops.xla.dynamo_set_buffer_donor_(self.cache, True)
            self.cache[2] += row
            return self.cache.sum()

    module, row = Counter().to(torch_xla.device()), torch.ones(4, device=torch_xla.device())
    step = compiled(module)
    totals = []
    for _ in range(3):
        totals.append(step(row).item())
    assert totals == [4, 8, 12]


def test_a_donated_tensor_is_named_as_the_user_names_it():
    def f(scale, cache):
        torch.ops.xla.dynamo_set_buffer_donor_(cache, True)
        return cache * scale

    call, cache, scale = compiled(f), on_device(4, 8), torch.ones((), device=torch_xla.device())
    call(scale, cache)
    with pytest.raises(pure_backend.DonationError, match=r"argument 'cache', a tensor of shape \(4, 8\), was donated"):
        call(scale, cache)


def _definite(x):
    return x @ x.mT + torch.eye(x.shape[-1], device=x.device)


LINALG = {
    "matrix_exp": torch.matrix_exp,
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x.sin()),
    "cholesky": lambda x: torch.linalg.cholesky(_definite(x)),
    "qr": lambda x: torch.linalg.qr(x)[1].abs(),
    "eigh": lambda x: torch.linalg.eigh(_definite(x))[0],
    "svd": lambda x: torch.linalg.svd(x)[1],
    "solve_triangular": lambda x: torch.linalg.solve_triangular(x, x.sin(), upper=True),
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "eigvals": lambda x: torch.linalg.eigvals(_definite(x)).real.sort()[0],
    "pinv": torch.linalg.pinv,
}


@pytest.mark.parametrize("name", LINALG)
def test_what_torch_xlas_client_lacks_runs_in_eager(name, caplog):
    """LAPACK's code is in jaxlib: torch_xla's own XLA does not find it."""
    operator = LINALG[name]

    def f(x):
        return (operator(x.sin() + 3 * torch.eye(4, device=x.device)) * 2).cos()

    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    with caplog.at_level(logging.WARNING, "pure_backend"):
        got = compiled(f)(x.to(torch_xla.device())).cpu()
    torch.testing.assert_close(got, f(x), rtol=1e-4, atol=1e-4)
    assert "torch_xla's XLA lacks lapack_" in caplog.text
    assert pure_backend.statistics().calls > 0  # what is around it is compiled


def test_its_gradient_is_eagers():
    def f(x):
        return torch.linalg.inv(x.sin() + 3 * torch.eye(4, device=x.device)).cos().sum()

    grads = []
    for call, device in ((f, "cpu"), (compiled(f), torch_xla.device())):
        x = torch.linspace(-1, 1, 16).reshape(4, 4).to(device).requires_grad_()
        call(x).backward()
        grads.append(x.grad.cpu())
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@jax.custom_vjp
def _plain(x):
    return x * 2


_plain.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.linalg.inv(x) * g,))


@jax_op("faults_xla::inverse_in_backward")
def inverse_in_backward(x: jax.Array) -> jax.Array:
    """An operator whose backward alone calls LAPACK."""
    return _plain(x)


def test_a_backward_that_calls_what_the_client_lacks(caplog):
    x = (torch.eye(4) * 2).to(torch_xla.device()).requires_grad_()
    with caplog.at_level(logging.WARNING, "pure_backend"):
        y = compiled(lambda x: inverse_in_backward(x.sin()).cos())(x)
    assert "inverse_in_backward" in caplog.text and "lapack_" in caplog.text
    torch.testing.assert_close(y.cpu(), (x.detach().cpu().sin() * 2).cos())


def test_an_operator_that_the_client_lacks_says_so():
    @jax_op("faults_xla::inverse")
    def inverse(x: jax.Array) -> jax.Array:
        return jnp.linalg.inv(x)

    with pytest.raises(pure_backend.UnsupportedOperatorError, match="torch_xla's XLA lacks lapack_sgetrf_ffi"):
        inverse(torch.eye(3, device=torch_xla.device()))


def test_a_training_step_that_calls_it_is_refused():
    model = torch.nn.Linear(4, 4).to(torch_xla.device())
    step = pure_backend.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: torch.linalg.inv(model.weight).sum()
    )
    with pytest.raises(pure_backend.PureBackendError, match="lacks lapack_sgetrf_ffi"):
        step(torch.ones(1, 4, device=torch_xla.device()))


def test_the_default_device_in_the_body_of_a_loop():
    def body(carry, x):
        return carry + x + torch.ones(2, device=torch_xla.device()), carry

    xs = torch.arange(6.0).reshape(3, 2).to(torch_xla.device())
    carry, ys = pure_backend.scan(body, torch.zeros(2, device=torch_xla.device()), xs)
    assert carry.tolist() == [9, 12] and ys.tolist() == [[0, 0], [1, 2], [4, 6]]
    assert pure_backend.assume_pure(lambda x: x + torch.ones((), device=torch_xla.device()))(xs).tolist()[0] == [1, 2]
    assert not hasattr(torch_xla.device, "_dynamo_marked_constant")
