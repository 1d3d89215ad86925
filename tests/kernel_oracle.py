"""The reference of a kernel as the oracle of its operator: values and gradients, eagerly and compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest value."""


def as_array(tensor: torch.Tensor) -> jax.Array:
    """A copy for the reference, which computes in f32."""
    tensor = tensor.detach().cpu()
    return jnp.asarray((tensor.float() if tensor.is_floating_point() else tensor).numpy())


def assert_near(got: torch.Tensor, want: Any, tol: float, what: str) -> None:
    """Assert that the largest difference is small against the largest value."""
    want = torch.tensor(want.tolist(), dtype=torch.float64).reshape(want.shape)
    assert got.shape == want.shape, what
    error = (got.detach().cpu().double() - want).abs().max() if want.numel() else torch.tensor(0.0)
    assert error <= tol * max(want.abs().max() if want.numel() else 0.0, 1e-3), f"{what}: {error}"


def agrees_with_reference(
    op: Callable[..., torch.Tensor],
    reference: Callable[..., jax.Array],
    tensors: Sequence[torch.Tensor],
    *static: Any,
    device: torch.device,
    tol: float | None = None,
    compiled: bool = False,
) -> None:
    """Assert that an operator computes what its reference does, and that its gradients are those of the reference.

    Args:
        op: The operator.
        reference: Of arrays.
        tensors: The operator's tensors, on the CPU; gradients are taken by the floating-point ones.
        *static: Its other arguments.
        device: Where the operator runs.
        tol: The largest difference in units of the largest value.
        compiled: Also run it compiled by the backend. An interpreted kernel takes seconds to compile.
    """
    tol = TOLERANCE[tensors[0].dtype] if tol is None else tol
    leaves = [t.to(device).requires_grad_(t.is_floating_point()) for t in tensors]
    arrays, floats = [as_array(t) for t in tensors], [i for i, t in enumerate(tensors) if t.is_floating_point()]

    def of_floats(*values: Any) -> jax.Array:
        full = list(arrays)
        for i, value in zip(floats, values, strict=True):
            full[i] = value
        return reference(*full, *static)

    with jax.default_matmul_precision("highest"):
        want, vjp = jax.vjp(of_floats, *(arrays[i] for i in floats))
        cotangent = torch.randn(want.shape).to(tensors[0].dtype)
        want_grads = vjp(as_array(cotangent).astype(want.dtype))
    for way in [op, torch.compile(op, backend="assume_pure", fullgraph=True)][: 1 + compiled]:
        got = way(*leaves, *static)
        assert got.dtype is tensors[0].dtype
        assert_near(got, want, tol, "result")
        grads = torch.autograd.grad(got, [leaves[i] for i in floats], cotangent.to(device))
        for i, grad, expected in zip(floats, grads, want_grads, strict=True):
            assert grad.dtype is tensors[i].dtype
            assert_near(grad, expected, tol, f"gradient {i}")
