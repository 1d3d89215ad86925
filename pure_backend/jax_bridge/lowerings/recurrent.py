"""Recurrent layers: a `lax.scan` for each layer and direction.

What the gates read of the input is one product before the loop, so that a step has the product with the hidden state only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.avals import to_aval
from pure_backend.jax_bridge.lowerings.random import dropped
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, unsupported
from pure_backend.jax_bridge.lowerings.values import wide

Carry = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of one layer in one direction; gates are stacked along the first dimension.

    Attributes:
        inner: `f[gates * hidden, in]`.
        hidden: `f[gates * hidden, out]`.
        inner_bias: `f[gates * hidden]`, or None.
        hidden_bias: The same for what is read of the hidden state.
        projection: `f[out, hidden]`, or None where `out` is `hidden`.
    """

    inner: jax.Array
    hidden: jax.Array
    inner_bias: jax.Array | None
    hidden_bias: jax.Array | None
    projection: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Layers:
    """How the layers of a call are arranged, in the order of torch's arguments."""

    has_biases: bool
    count: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        """1, or 2 if bidirectional."""
        return 2 if self.bidirectional else 1

    def weights(self, params: Sequence[jax.Array]) -> list[Weights]:
        """One for each layer and direction."""
        size = len(params) // (self.count * self.directions)
        return [self._weights(params[i : i + size]) for i in range(0, len(params), size)]

    def _weights(self, own: Sequence[jax.Array]) -> Weights:
        biases = 2 if self.has_biases else 0
        inner_bias, hidden_bias = own[2:4] if biases else (None, None)
        return Weights(own[0], own[1], inner_bias, hidden_bias, own[2 + biases] if len(own) > 2 + biases else None)


Cell = Callable[[jax.Array, Carry, Weights], Carry]
"""`cell(read of the input, carry, weights) -> carry`; the first of a carry is the cell's output."""


def _product(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`x @ weight.T + bias` in the precision that gates are computed in."""
    out = wide(lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ()))))
    return out if bias is None else out + wide(bias)


def _lstm_cell(read: jax.Array, carry: Carry, weights: Weights) -> Carry:
    hidden, cell = carry
    i, f, g, o = jnp.split(read + _product(hidden, weights.hidden, weights.hidden_bias), 4, axis=-1)
    new = jax.nn.sigmoid(f) * wide(cell) + jax.nn.sigmoid(i) * jnp.tanh(g)
    out = (jax.nn.sigmoid(o) * jnp.tanh(new)).astype(hidden.dtype)
    if weights.projection is not None:
        out = _product(out, weights.projection, None).astype(hidden.dtype)
    return out, new.astype(cell.dtype)


def _gru_cell(read: jax.Array, carry: Carry, weights: Weights) -> Carry:
    (hidden,) = carry
    r, z, n = jnp.split(read, 3, axis=-1)
    hidden_r, hidden_z, hidden_n = jnp.split(_product(hidden, weights.hidden, weights.hidden_bias), 3, axis=-1)
    z = jax.nn.sigmoid(z + hidden_z)
    n = jnp.tanh(n + jax.nn.sigmoid(r + hidden_r) * hidden_n)
    return (((wide(hidden) - n) * z + n).astype(hidden.dtype),)


def _elman_cell(activation: Callable[[jax.Array], jax.Array]) -> Cell:
    def cell(read: jax.Array, carry: Carry, weights: Weights) -> Carry:
        (hidden,) = carry
        return (activation(read + _product(hidden, weights.hidden, weights.hidden_bias)).astype(hidden.dtype),)

    return cell


def _one_direction(cell: Cell, x: jax.Array, carry: Carry, weights: Weights, reverse: bool) -> tuple[jax.Array, Carry]:
    """The outputs of all steps, and the last carry."""

    def step(carry: Carry, read: jax.Array) -> tuple[Carry, jax.Array]:
        carry = cell(read, carry, weights)
        return carry, carry[0]

    last, outputs = lax.scan(step, carry, _product(x, weights.inner, weights.inner_bias), reverse=reverse)
    return outputs, last


def _all_layers(
    site: Site, cell: Cell, x: jax.Array, states: Sequence[jax.Array], params: Sequence[jax.Array], layers: Layers
) -> tuple[jax.Array, ...]:
    """`(outputs, *last states)`, the states stacked for all layers and directions."""
    x, *params = (value.astype(site.dtype) for value in (x, *params))
    states = [state.astype(out.dtype) for state, out in zip(states, _expected(site), strict=True)]
    x, lasts, all_weights = jnp.swapaxes(x, 0, 1) if layers.batch_first else x, [], layers.weights(params)
    for layer in range(layers.count):
        if layer and layers.train and layers.dropout:
            x = dropped(site, x, layers.dropout, x.shape)
        outputs = []
        for direction in range(layers.directions):
            i = layer * layers.directions + direction
            output, last = _one_direction(cell, x, tuple(state[i] for state in states), all_weights[i], bool(direction))
            outputs.append(output)
            lasts.append(last)
        x = jnp.concatenate(outputs, axis=-1)
    x = jnp.swapaxes(x, 0, 1) if layers.batch_first else x
    return (x, *(jnp.stack(values) for values in zip(*lasts, strict=True)))


def _expected(site: Site) -> list[jax.ShapeDtypeStruct]:
    """What torch gives for the last states."""
    return [to_aval(value) for value in site.out[1:]]


@lowers("lstm")
def lstm(site: Site, x, states, params, *arrangement):
    """`(output, h, c)` for `x: f[steps, batch, in]` and `states = (h0, c0)`, each `f[layers * directions, batch, size]`."""
    if isinstance(states, jax.Array):
        raise unsupported(site, _PACKED)
    return _all_layers(site, _lstm_cell, x, states, params, Layers(*arrangement))


def _hidden_only(name: str, cell: Cell) -> None:
    @lowers(name)
    def lower(site: Site, x, state, params, *arrangement):
        """`(output, h)`, as for `lstm`."""
        if isinstance(params, jax.Array):
            raise unsupported(site, _PACKED)
        return _all_layers(site, cell, x, [state], params, Layers(*arrangement))


_PACKED = "a packed sequence has another batch at every step: pad it, and mask what is behind the end"

_hidden_only("gru", _gru_cell)
_hidden_only("rnn_tanh", _elman_cell(jnp.tanh))
_hidden_only("rnn_relu", _elman_cell(lambda x: jnp.where(x > 0, x, 0)))
