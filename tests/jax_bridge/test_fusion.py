"""Kernels of XLA:CPU stay small however deep a model is, and jaxprs are rewritten without losing what they share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pure_backend.jax_bridge.fusion import bounded
from pure_backend.jax_bridge.lower import to_hlo
from pure_backend.jax_bridge.platform import compile_options, for_platform


def _norm(x):
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5)


def _deep(pre_norm, depth):
    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh(_norm(x) @ w) if pre_norm else _norm(x + jnp.tanh(x @ w))
        return jnp.mean(x**2)

    generator = np.random.default_rng(0)
    weights = [generator.normal(size=(16, 16)).astype("float32") / 4 for _ in range(depth)]
    return loss, weights, generator.normal(size=(4, 16)).astype("float32")


def _compiled(jaxpr):
    return to_hlo(jaxpr, "cpu").compile(compile_options("cpu"))


def _largest_kernel(compiled):
    computations = compiled.as_text().split("\n\n")
    return max(c.count("\n") for c in computations if c.lstrip().startswith("%fused"))


@pytest.mark.parametrize("pre_norm", [True, False])
def test_kernels_do_not_grow_with_depth(pre_norm):
    sizes = {}
    for depth in (6, 18):
        loss, weights, x = _deep(pre_norm, depth)
        sizes[depth] = _largest_kernel(_compiled(for_platform(jax.make_jaxpr(jax.grad(loss))(weights, x), "cpu")))
    assert sizes[18] <= sizes[6] + 10


def _product(lhs, rhs, summed, batch=((), ())):
    return jax.lax.dot_general(lhs, rhs, (summed, batch))


def _barriers(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    return str(bounded(jaxpr.jaxpr)).count("optimization_barrier")


def test_what_a_product_transposes_is_computed_before():
    both = ((0, 1), (0, 1))
    assert _barriers(lambda g, x: _product(g * 2, x, both), (4, 8, 6), (4, 8, 5)) == 1
    assert _barriers(lambda g, x: _product(g, x * 2, both), (4, 8, 6), (4, 8, 5)) == 0  # the order that XLA wants
    assert _barriers(lambda g, x: _product(g, x, both), (4, 8, 6), (4, 8, 5)) == 0  # nothing to compute
    assert _barriers(lambda x, w: _product(x * 2, w, ((2,), (1,))), (4, 8, 6), (5, 6)) == 0
    assert _barriers(lambda g, x: _product(g * 2, x, ((0,), (0,))), (8, 6), (8, 5)) == 0  # XLA transposes inside
    assert _barriers(lambda g, x: _product(g * 2, x, both), (1, 8, 1), (1, 8, 5)) == 0  # the same bytes


def test_values_are_those_of_the_program_without_barriers():
    loss, weights, x = _deep(False, 4)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(weights, x)
    expected = core.jaxpr_as_fun(jaxpr)(*weights, x)
    found = _compiled(for_platform(jaxpr, "cpu"))(*weights, x)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_shared_function_stays_one_function():
    @jax.jit
    def layer(x):
        for _ in range(40):
            x = jnp.sin(x) * jnp.cos(x)
        return x

    jaxpr = for_platform(jax.make_jaxpr(lambda x: layer(layer(layer(x))))(jnp.ones(3)), "cpu")
    bodies = {eqn.params["jaxpr"] for eqn in jaxpr.eqns if "jaxpr" in eqn.params}
    assert len(bodies) == 1
    assert any(eqn.primitive.name == "optimization_barrier" for eqn in next(iter(bodies)).jaxpr.eqns)


def test_short_chains_and_other_platforms_are_left_alone():
    jaxpr = jax.make_jaxpr(lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.04 * x**3))))(jnp.ones(3))
    assert for_platform(jaxpr, "cpu") is jaxpr
    assert bounded(jaxpr.jaxpr) is jaxpr.jaxpr
    loss, weights, x = _deep(False, 6)
    deep = jax.make_jaxpr(jax.grad(loss))(weights, x)
    assert for_platform(deep, "tpu") is deep


@pytest.mark.parametrize("size", [2, 4096])
def test_loops(size):
    """XLA:CPU compiles small loops by other means, which fail on a barrier; what a large one fuses is bounded."""

    def body(carry, x):
        for _ in range(20):
            carry = jnp.sin(carry) * x + jnp.cos(carry)
        return jax.lax.optimization_barrier(jax.checkpoint(jnp.tanh)(carry)), carry

    def loss(x):
        return jax.lax.scan(body, x, jnp.ones((3, size)))[0].sum()

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(jnp.ones(size))
    rewritten = for_platform(jaxpr, "cpu")
    assert ("optimization_barrier" in str(rewritten)) == (size > 2)
    found = _compiled(rewritten)(jnp.ones(size))
    for a, b in zip(found, core.jaxpr_as_fun(jaxpr)(jnp.ones(size)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
