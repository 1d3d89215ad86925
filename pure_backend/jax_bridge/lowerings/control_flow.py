"""Higher-order operators: their bodies are traced by the same walker as the graph around them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree

from pure_backend.jax_bridge.lowerings.registry import Site, lowers


@lowers("hop::tag_activation_checkpoint")
def checkpoint(site: Site, body, *operands, **kwargs):
    """The body, recomputed in the backward. Its random keys are values of the trace, so the masks are the forward's."""
    (gm,) = site.bodies
    results = jax.checkpoint(lambda *arrays: tuple(site.body(gm, arrays)), prevent_cse=False)(*operands)
    return _like(site.out, results)


@lowers("hop::autograd_function_apply")
def autograd_function(site: Site, forward, backward, *operands, **kwargs):
    """A user's `autograd.Function`: the forward body, with the user's backward body as its gradient."""
    forward_gm, backward_gm = site.bodies
    count = len(pytree.tree_leaves(site.out))
    tensors = [i for i, operand in enumerate(operands) if isinstance(operand, jax.Array)]

    def run(arrays):
        full = list(operands)
        for i, array in zip(tensors, arrays, strict=True):
            full[i] = array
        return tuple(site.body(forward_gm, _with_context(forward_gm, full)))

    @jax.custom_vjp
    def apply(*arrays):
        return run(arrays)[:count]

    def apply_forward(*arrays):
        results = run(arrays)
        return results[:count], results[count:]

    def apply_backward(saved, cotangents):
        grads = site.body(backward_gm, _with_context(backward_gm, [*cotangents, *saved]))
        grads = dict(zip(range(len(operands)), grads, strict=False))
        return tuple(_cotangent(grads.get(i), operands[i]) for i in tensors)

    apply.defvjp(apply_forward, apply_backward)
    return _like(site.out, apply(*(operands[i] for i in tensors)))


@lowers("region")
def region(site: Site, *operands):
    """A stretch under `torch.func` transforms: its ATen graph."""
    (gm,) = site.bodies
    return tuple(site.body(gm, [operand for operand in operands if isinstance(operand, jax.Array)]))


def _with_context(gm: torch.fx.GraphModule, operands: list) -> list:
    expected = len(gm.graph.find_nodes(op="placeholder"))
    return [None] * (expected - len(operands)) + list(operands)


def _cotangent(grad, primal):
    """What JAX expects for a primal: zeros for None, float0 for what carries no gradient."""
    if not jnp.issubdtype(primal.dtype, jnp.inexact):
        return jax.numpy.zeros(primal.shape, jax.dtypes.float0)
    return jnp.zeros_like(primal) if grad is None else _summed_to(grad, primal.shape).astype(primal.dtype)


def _summed_to(grad, shape):
    """A gradient in the shape of its primal: torch sums over what was broadcast."""
    lead = tuple(range(grad.ndim - len(shape)))
    grad = jnp.sum(grad, lead) if lead else grad
    over = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return jnp.broadcast_to(jnp.sum(grad, over, keepdims=True) if over else grad, shape)


def _like(out, results):
    """Flat results in the structure of torch's own result."""
    if isinstance(out, torch.Tensor):
        return results[0]
    return tuple(results)
