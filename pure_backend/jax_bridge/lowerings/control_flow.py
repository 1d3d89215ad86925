"""Branches, loops and nested functions: their bodies are traced by the same walker as the graph around them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.ir.canonical import graph_key
from pure_backend.jax_bridge.lowerings.bodies import Body, results, structured
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, updates
from pure_backend.jax_bridge.rng import fold_data


@updates
@lowers("region")
def region(site: Site, *operands, **kwargs):
    """A stretch under `torch.func` transforms, or a function of the user's: its ATen graph."""
    (gm,) = site.bodies
    return results(site, site.body(gm, [leaf for leaf in jax.tree.leaves((operands, kwargs)) if isinstance(leaf, jax.Array)]))


@lowers("aten::_efficientzerotensor", "aten::_new_zeros_with_same_feature_meta")
def zero_tangent(site: Site, *args, **kwargs):
    """The tangent of what does not depend on the input, in forward-mode derivatives."""
    return jnp.zeros(site.out.shape, site.dtype)


@updates
@lowers("hop::wrap", "hop::invoke_quant", "hop::invoke_quant_packed")
def inlined(site: Site, body, *operands, **kwargs):
    """An operator that is its body."""
    return _inline(site, operands)


@updates
@lowers("hop::hints_wrapper", "hop::strict_mode", "hop::run_const_graph")
def inlined_packed(site: Site, body, operands, *args, **kwargs):
    """An operator that is its body, its operands in one tuple."""
    return _inline(site, operands)


@updates
@lowers("hop::wrap_with_set_grad_enabled")
def with_grad_mode(site: Site, enabled, body, *operands):
    """A body under a grad mode, which its nodes' facts know."""
    return _inline(site, operands)


@updates
@lowers("hop::wrap_with_autocast")
def with_autocast(site: Site, device, dtype, enabled, cache_enabled, body, *operands):
    """A body under autocast, which its nodes' facts know."""
    return _inline(site, operands)


@lowers("hop::out_dtype")
def out_dtype(site: Site, op, dtype, *operands):
    """An operator on operands of the result's dtype."""
    (gm,) = site.bodies
    return site.body(gm, operands)[0]


def _inline(site: Site, operands):
    (gm,) = site.bodies
    return results(site, [leaf for leaf in site.body(gm, operands) if isinstance(leaf, jax.Array)])


@updates
@lowers("hop::invoke_subgraph")
def invoke_subgraph(site: Site, subgraph, identifier, *operands):
    """A nested jit: equal bodies are traced once and are one function of the HLO, however often they are called."""
    (gm,) = site.bodies
    return _nested(site, ("invoke_subgraph", graph_key(gm)), str(identifier), operands)


@lowers("shared")
def shared(site: Site, *operands):
    """A stretch that the graph has several times, as a nested jit."""
    (gm,) = site.bodies
    return _nested(site, ("shared", gm), "shared", operands)


def _nested(site: Site, name: tuple, label: str, operands):
    """A call of the function `name` of this trace; `label` is its name in the HLO."""
    (gm,) = site.bodies
    name = (*name, tuple(None if isinstance(operand, jax.Array) else operand for operand in operands))
    if name not in site.shared:
        body = Body(site, gm, operands)
        body.__name__ = label
        site.shared[name] = (body, jax.jit(body))
    body, function = site.shared[name]
    arrays = function(site.keys.data_for_body(), *body.arrays(operands))
    site.keys.note_body(body.draws)
    return results(site, arrays)


@lowers("hop::cond")
def cond(site: Site, pred, true_fn, false_fn, operands):
    """`lax.cond`; a predicate that is a Python bool chooses while tracing."""
    if not isinstance(pred, jax.Array):
        leaves = site.body(site.bodies[0 if pred else 1], operands)
        return structured(site.out, [leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    branches = [Body(site, gm, operands) for gm in site.bodies]
    key = site.keys.data_for_body()
    arrays = lax.cond(jnp.reshape(pred, ()), *branches, key, *branches[0].arrays(operands))
    site.keys.note_body(any(branch.draws for branch in branches))
    return structured(site.out, arrays)


@lowers("hop::while_loop")
def while_loop(site: Site, cond_fn, body_fn, carried, additional):
    """`lax.while_loop`; the number of the step is carried along for random keys."""
    condition, body = (Body(site, gm, (*carried, *additional)) for gm in site.bodies)
    key = site.keys.data_for_body()
    captured = body.arrays((*carried, *additional))[len(carried) :]

    def step(state):
        count, *carry = state
        return (count + 1, *body(fold_data(fold_data(key, count), 0), *carry, *captured))

    def goes_on(state):
        count, *carry = state
        return jnp.reshape(condition(fold_data(key, count), *carry, *captured)[0], ())

    _, *arrays = lax.while_loop(goes_on, step, (jnp.uint32(0), *carried))
    site.keys.note_body(body.draws or condition.draws)
    return structured(site.out, arrays)


@lowers("hop::scan")
def scan(site: Site, combine_fn, init, xs, additional):
    """`lax.scan`."""
    init, xs = tuple(init), tuple(xs)
    body = Body(site, site.bodies[0], (*init, *xs, *additional))
    key = site.keys.data_for_body()
    captured = body.arrays((*init, *xs, *additional))[len(init) + len(xs) :]

    def step(carry, x):
        count, *slices = x
        arrays = body(fold_data(key, count), *carry, *slices, *captured)
        return arrays[: len(init)], arrays[len(init) :]

    carry, ys = lax.scan(step, init, (jnp.arange(xs[0].shape[0], dtype=jnp.uint32), *xs))
    site.keys.note_body(body.draws)
    return structured(site.out, (*carry, *ys))


@lowers("hop::map_impl")
def map_impl(site: Site, f, xs, additional):
    """`lax.scan` without a carry: one row after the other, as torch does it."""
    xs = tuple(xs)
    body = Body(site, site.bodies[0], (*xs, *additional))
    key = site.keys.data_for_body()
    captured = body.arrays((*xs, *additional))[len(xs) :]

    def step(_, x):
        count, *slices = x
        return None, body(fold_data(key, count), *slices, *captured)

    _, ys = lax.scan(step, None, (jnp.arange(xs[0].shape[0], dtype=jnp.uint32), *xs))
    site.keys.note_body(body.draws)
    return structured(site.out, ys)


@lowers("hop::associative_scan")
def associative_scan(site: Site, combine_fn, xs, additional):
    """`lax.associative_scan`, which combines many pairs at once: the body is for one pair."""
    xs = tuple(xs)
    body = Body(site, site.bodies[0], (*xs, *xs, *additional))
    key = site.keys.data_for_body()
    captured = body.arrays((*xs, *xs, *additional))[2 * len(xs) :]
    rounds = itertools.count()

    def combine(left, right):
        here = fold_data(key, next(rounds))
        return jax.vmap(lambda i, a, b: body(fold_data(here, i), *a, *b, *captured))(jnp.arange(len(left[0])), left, right)

    arrays = lax.associative_scan(combine, xs)
    site.keys.note_body(body.draws)
    return structured(site.out, arrays)


@jax.jit
def _stacked(*rows):
    """Arrays of one shape as rows; differentiated once for all that have this shape."""
    return jnp.stack(rows)


@lowers("chain")
def chain(site: Site, *operands):
    """Calls that are given results of the one before, as a `lax.scan` over what each has of its own."""
    spec = site.node.target
    inputs = spec.by_input(operands)
    body = Body(site, spec.gm, [value[0] if i in spec.own else value for i, value in enumerate(inputs)])
    key = site.keys.data_for_body()

    def step(carry, x):
        count, *slices = x
        args = list(inputs)
        for i, value in (*zip(dict(spec.carried), carry, strict=True), *zip(spec.own, slices, strict=True)):
            args[i] = value
        arrays = body(fold_data(key, count), *args)
        return [arrays[result] for _, result in spec.carried], [arrays[result] for result in kept]

    kept = sorted({result for _, result in spec.wanted})
    stacked = [inputs[i] if i in spec.stacked else _stacked(*inputs[i]) for i in spec.own]
    init = [inputs[i] for i, _ in spec.carried]
    _, ys = lax.scan(step, init, (jnp.arange(spec.turns, dtype=jnp.uint32), *stacked))
    site.keys.note_body(body.draws)
    return tuple(ys[kept.index(result)][turn] for turn, result in spec.wanted)
