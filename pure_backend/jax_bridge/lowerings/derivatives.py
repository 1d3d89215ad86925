"""Higher-order operators that say how a body is differentiated: checkpoints and `autograd.Function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.utils import _pytree as pytree

from pure_backend.ir import functional_ops
from pure_backend.jax_bridge.lowerings.bodies import Body, results, structured
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, updates
from pure_backend.jax_bridge.rng import fold_data

_SAVED = "saved"


@lowers("saved")
def saved(site: Site, value):
    """A value that a selective checkpoint keeps."""
    return checkpoint_name(value, _SAVED)


@updates
@lowers("hop::tag_activation_checkpoint", "hop::wrap_activation_checkpoint")
def checkpoint(site: Site, body, *operands, **kwargs):
    """The body, recomputed in the backward. Its random key is an argument, so the masks are the forward's."""
    (gm,) = site.bodies
    selective = any(node.target is functional_ops.saved for node in gm.graph.nodes)
    policy = jax.checkpoint_policies.save_only_these_names(_SAVED) if selective else None
    body = Body(site, gm, operands)
    arrays = _recomputed(body, policy)(site.keys.data_for_body(), *body.arrays(operands))
    site.keys.note_body(body.draws)
    return results(site, arrays)


def _recomputed(function: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """`jax.checkpoint`, which an enclosing `jax.checkpoint` leaves alone.

    Whole programs are differentiated under a residual policy, and JAX applies the policy of the outermost checkpoint to those
    inside it: products of the body would be kept. As a custom derivative the body keeps what its own policy says.
    """
    function = jax.checkpoint(function, policy=policy, prevent_cse=False)
    apply = jax.custom_vjp(function)
    apply.defvjp(lambda *arrays: jax.vjp(function, *arrays), lambda vjp, cotangents: vjp(cotangents))
    return apply


@lowers("hop::autograd_function_apply")
def autograd_function(site: Site, forward, backward, *operands, **kwargs):
    """A user's `autograd.Function`: the forward body, with the user's backward body as its gradient."""
    forward_gm, backward_gm = site.bodies
    given = _with_context(forward_gm, operands)
    body = Body(site, forward_gm, given)
    arrays = body.arrays(given)
    saved_outputs = _saved_outputs(forward_gm, len(pytree.tree_leaves(site.out)))
    draws: list[bool] = []

    def split(leaves):
        count = len(pytree.tree_leaves(site.out))
        return leaves[:count], leaves[count:]

    @jax.custom_vjp
    def apply(key, *arrays):
        return tuple(leaf for leaf in split(body.leaves(key, *arrays))[0] if isinstance(leaf, jax.Array))

    def apply_forward(key, *arrays):
        # The outputs are those of `apply` and not of its body: a second derivative goes through this function's own backward.
        outputs = apply(key, *arrays)
        leaves, saved = split(body.leaves(key, *arrays))
        remaining = iter(outputs)
        leaves = [next(remaining) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        saved = [leaves[saved_outputs[i]] if i in saved_outputs else leaf for i, leaf in enumerate(saved)]
        return outputs, (key, arrays, saved)

    def apply_backward(residuals, cotangents):
        key, arrays, saved = residuals
        given = _with_context(backward_gm, [*_materialized(site.out, cotangents), *saved])
        backward_body = Body(site, backward_gm, given)
        grads = dict(enumerate(backward_body.leaves(fold_data(key, 0), *backward_body.arrays(given))))
        draws.append(backward_body.draws)
        places = [i for i, operand in enumerate(operands) if isinstance(operand, jax.Array)]
        return (_zero(key), *(_cotangent(grads.get(i), array) for i, array in zip(places, arrays, strict=True)))

    def backward_of_results(key, *arrays):
        outputs, residuals = apply_forward(key, *arrays)
        apply_backward(residuals, outputs)

    apply.defvjp(apply_forward, apply_backward)
    key = site.keys.data_for_body()
    jax.eval_shape(backward_of_results, key, *arrays)  # JAX traces the backward late; what it cannot lower shall be known now
    outputs = apply(key, *arrays)
    site.keys.note_body(body.draws or any(draws))
    return structured(site.out, outputs)


def _saved_outputs(forward: torch.fx.GraphModule, count: int) -> dict[int, int]:
    """Which of the saved values is which output: `ctx.save_for_backward(result)`."""
    leaves = pytree.tree_leaves(forward.graph.output_node().args[0])
    outputs = {leaf: i for i, leaf in enumerate(leaves[:count]) if isinstance(leaf, torch.fx.Node) and leaf.op != "placeholder"}
    return {i: outputs[leaf] for i, leaf in enumerate(leaves[count:]) if leaf in outputs}


def _materialized(out: Any, cotangents: tuple) -> list[Any]:
    """A cotangent for each output, zeros for those that carry none, as torch gives them to a backward."""
    remaining = iter(cotangents)
    return [_zeros_if_float0(next(remaining)) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(out)]


def _zeros_if_float0(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, jnp.bool_) if cotangent.dtype == jax.dtypes.float0 else cotangent


def _with_context(gm: torch.fx.GraphModule, operands: Any) -> list:
    expected = len(gm.graph.find_nodes(op="placeholder"))
    return [None] * (expected - len(operands)) + list(operands)


def _zero(primal: jax.Array) -> Any:
    if not jnp.issubdtype(primal.dtype, jnp.inexact):
        return jnp.zeros(primal.shape, jax.dtypes.float0)
    return jnp.zeros_like(primal)


def _cotangent(grad: Any, primal: jax.Array) -> Any:
    """What JAX expects for a primal: zeros for None, float0 for what carries no gradient."""
    if grad is None or not jnp.issubdtype(primal.dtype, jnp.inexact):
        return _zero(primal)
    return _summed_to(grad, primal.shape).astype(primal.dtype)


def _summed_to(grad: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A gradient in the shape of its primal: torch sums over what was broadcast."""
    lead = tuple(range(grad.ndim - len(shape)))
    grad = jnp.sum(grad, lead) if lead else grad
    over = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return jnp.broadcast_to(jnp.sum(grad, over, keepdims=True) if over else grad, shape)
