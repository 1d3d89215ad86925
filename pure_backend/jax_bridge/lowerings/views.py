"""The operators that the `mutation` pass puts into a graph, on arrays; their torch bodies are the reference."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.ir.geometry import Geometry
from pure_backend.ir.views import Gather, Plan, plan_view
from pure_backend.jax_bridge.avals import to_jax_dtype
from pure_backend.jax_bridge.lowerings.registry import Site, lowers


@lowers("read_view")
def read_view(site: Site, value, base: Geometry, view: Geometry):
    """The elements a view shows, from the value of its base."""
    value, base, view_parts = _common_type(value, base, view)
    out = _read(value, plan_view(base, view_parts))
    return _typed(out, view)


@lowers("write_view")
def write_view(site: Site, value, new, base: Geometry, view: Geometry):
    """The value of the base after a write through a view."""
    parts, base_parts, view_parts = _common_type(value, base, view)
    new = _untyped(new, view, parts.dtype)
    out = _write(parts, new, plan_view(base_parts, view_parts))
    if out.dtype == value.dtype:
        return out
    if base.dtype.is_complex:
        return lax.complex(out[..., 0], out[..., 1])
    return lax.bitcast_convert_type(out, value.dtype)


@lowers("as_strided")
def as_strided(site: Site, x, size, stride, storage_offset=None):
    """Elements by stride, counted from where `x` lies in memory."""
    base, view = Geometry.of(site.args[0]), Geometry.of(site.out)
    return _read(x, plan_view(base, view))


@lowers("keep_gradient")
def keep_gradient(site: Site, new, old):
    """The value of `new`, the gradient of `old`."""
    return _keep_gradient(new, old)


@jax.custom_jvp
def _keep_gradient(new, old):
    return new


@_keep_gradient.defjvp
def _keep_gradient_jvp(primals, tangents):
    return primals[0], tangents[1]


def _common_type(value, base: Geometry, view: Geometry):
    """Base and view counted in elements of one type: the parts of a complex base, the bits of another width-alike."""
    if base.dtype == view.dtype:
        return value, base, view
    if base.dtype.is_complex:
        return jnp.stack([value.real, value.imag], axis=-1), _parts(base), view
    if view.dtype.is_complex:
        return value, base, _parts(view)
    return lax.bitcast_convert_type(value, to_jax_dtype(view.dtype)), base, view


def _parts(g: Geometry) -> Geometry:
    return g._replace(size=(*g.size, 2), stride=(*(2 * s for s in g.stride), 1), offset=2 * g.offset)


def _typed(out, view: Geometry):
    """What was read, as the view's type, conjugated or negated if the view says so."""
    if view.dtype.is_complex and not jnp.issubdtype(out.dtype, jnp.complexfloating):
        out = lax.complex(out[..., 0], out[..., 1])
    out = jnp.conj(out) if view.conj else out
    return -out if view.neg else out


def _untyped(new, view: Geometry, dtype):
    """What is written, as the memory's type."""
    new = -new if view.neg else new
    new = jnp.conj(new) if view.conj else new
    if view.dtype.is_complex and not jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.stack([new.real, new.imag], axis=-1)
    return new.astype(dtype)


def _read(value, plan: Plan):
    memory = jnp.transpose(value, plan.order)
    if isinstance(plan, Gather):
        if math.prod(plan.size) == 0:
            return jnp.zeros(plan.size, value.dtype)
        return memory.reshape(-1)[_places(plan)]
    cut = lax.slice(memory.reshape(plan.shape), plan.start, plan.limit, plan.step)
    return jnp.broadcast_to(cut.reshape(plan.picked).transpose(plan.out).reshape(plan.keep), plan.size)


def _write(value, new, plan: Plan):
    memory = jnp.transpose(value, plan.order)
    if isinstance(plan, Gather):
        if math.prod(plan.size) == 0:
            return value
        written = memory.reshape(-1).at[_places(plan)].set(new).reshape(memory.shape)
    else:
        written = _write_slices(memory.reshape(plan.shape), new, plan).reshape(memory.shape)
    return jnp.transpose(written, _inverse(plan.order))


def _write_slices(memory, new, plan):
    ordered = new.reshape([n for n in plan.keep if n != 1])
    ordered = ordered.transpose(_inverse(plan.out))
    extent = [-(-(b - a) // s) for a, b, s in zip(plan.start, plan.limit, plan.step, strict=True)]
    box = ordered.reshape(extent)
    if tuple(extent) == memory.shape:
        return box
    index = tuple(slice(a, b, s) for a, b, s in zip(plan.start, plan.limit, plan.step, strict=True))
    return memory.at[index].set(box)


def _places(plan: Gather):
    place = jnp.full((), plan.offset, jnp.int64)
    for dim, (n, stride) in enumerate(zip(plan.size, plan.stride, strict=True)):
        if n > 1 and stride:
            place = place + (jnp.arange(n) * stride).reshape([n if d == dim else 1 for d in range(len(plan.size))])
    return jnp.broadcast_to(place, plan.size)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(i) for i in range(len(order))]
