"""The operators that the `mutation` pass puts into a graph, on arrays; their torch bodies are the reference."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from pure_backend.ir.geometry import Geometry
from pure_backend.ir.views import Access, Gather, OutOfBase, access_of
from pure_backend.jax_bridge.avals import to_jax_dtype
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, unsupported
from pure_backend.jax_bridge.lowerings.values import keep_gradient_of


@lowers("read_view")
def read_view(site: Site, value, base: Geometry, view: Geometry):
    """The elements a view shows, from the value of its base."""
    memory, base, parts = _common_type(value, base, view)
    out = _read(memory, access_of(base, parts))
    out = _from_parts(out, to_jax_dtype(view.dtype))
    out = jnp.conj(out) if view.conj else out
    return -out if view.neg else out


@lowers("write_view")
def write_view(site: Site, value, new, base: Geometry, view: Geometry):
    """The value of the base after a write through a view."""
    memory, memory_base, parts = _common_type(value, base, view)
    new = -new if view.neg else new
    new = jnp.conj(new) if view.conj else new
    written = _write(memory, _to_parts(new.astype(to_jax_dtype(view.dtype)), memory.dtype), access_of(memory_base, parts))
    return _from_parts(written, value.dtype)


@lowers("as_strided", "as_strided_copy")
def as_strided(site: Site, x, size, stride, storage_offset=None):
    """Elements by stride, counted from where `x` lies in memory."""
    return _read(x, _strided_access(site, size, stride, storage_offset))


@lowers("as_strided_scatter")
def as_strided_scatter(site: Site, x, source, size, stride, storage_offset=None):
    """`x` with the elements at strides replaced."""
    if site.args[0].requires_grad:
        raise unsupported(site, "eager's gradient of as_strided_scatter goes to the elements that were replaced")
    return _write(x, source.astype(x.dtype), _strided_access(site, size, stride, storage_offset))


def _strided_access(site: Site, size, stride, storage_offset) -> Access:
    """Where a view by strides lies; they count along the memory of the first argument as eager has it."""
    base = Geometry.of(site.args[0])
    offset = base.offset if storage_offset is None else storage_offset
    view = base._replace(size=tuple(size), stride=tuple(stride), offset=offset)
    try:
        return access_of(base, view)
    except OutOfBase as error:
        raise unsupported(site, f"strides show memory beyond the tensor they are taken of ({error})") from error


@lowers("keep_gradient")
def keep_gradient(site: Site, new, old):
    """The value of `new`, the gradient of `old`."""
    return keep_gradient_of(new, old)


def _common_type(value, base: Geometry, view: Geometry):
    """Memory, base and view counted in elements of one type, the smaller of the two: real parts, or bits."""
    if base.dtype == view.dtype:
        return value, base, view
    if base.dtype.itemsize >= view.dtype.itemsize:
        return _to_parts(value, to_jax_dtype(view.dtype)), _parts(base, view.dtype), view
    return value, base, _parts(view, base.dtype)


def _parts(g: Geometry, dtype) -> Geometry:
    """A geometry counted in elements of a smaller dtype; an element becomes a last dimension of its parts."""
    n = g.dtype.itemsize // dtype.itemsize
    if n == 1:
        return g._replace(dtype=dtype)
    return g._replace(size=(*g.size, n), stride=(*(n * s for s in g.stride), 1), offset=n * g.offset, dtype=dtype)


def _to_parts(value, dtype):
    """Values as elements of a smaller (or equally wide) dtype, in a last dimension if there are several."""
    if value.dtype == dtype:
        return value
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return _to_parts(jnp.stack([value.real, value.imag], axis=-1), dtype)
    value = value.astype(jnp.uint8) if value.dtype == jnp.bool_ else value
    return lax.bitcast_convert_type(value, dtype)


def _from_parts(parts, dtype):
    """The inverse of `_to_parts`."""
    if parts.dtype == dtype:
        return parts
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(parts[..., 0], parts[..., 1])
    return parts.astype(bool) if dtype == jnp.bool_ else lax.bitcast_convert_type(parts, dtype)


def _read(value, access: Access):
    memory = jnp.transpose(value, access.order)
    if isinstance(access, Gather):
        if math.prod(access.size) == 0:
            return jnp.zeros(access.size, value.dtype)
        return memory.reshape(-1)[_places(access)]
    cut = lax.slice(memory.reshape(access.shape), access.start, access.limit, access.step)
    return jnp.broadcast_to(cut.reshape(access.picked).transpose(access.out).reshape(access.keep), access.size)


def _write(value, new, access: Access):
    memory = jnp.transpose(value, access.order)
    if isinstance(access, Gather):
        if math.prod(access.size) == 0:
            return value
        written = memory.reshape(-1).at[_places(access)].set(new).reshape(memory.shape)
    else:
        written = _write_slices(memory.reshape(access.shape), new, access).reshape(memory.shape)
    return jnp.transpose(written, _inverse(access.order))


def _write_slices(memory, new, access):
    ordered = new.reshape([n for n in access.keep if n != 1])
    ordered = ordered.transpose(_inverse(access.out))
    extent = [-(-(b - a) // s) for a, b, s in zip(access.start, access.limit, access.step, strict=True)]
    box = ordered.reshape(extent)
    if tuple(extent) == memory.shape:
        return box
    index = tuple(slice(a, b, s) for a, b, s in zip(access.start, access.limit, access.step, strict=True))
    return memory.at[index].set(box)


def _places(access: Gather):
    place = jnp.full((), access.offset, jnp.int64)
    for dim, (n, stride) in enumerate(zip(access.size, access.stride, strict=True)):
        if n > 1 and stride:
            place = place + (jnp.arange(n) * stride).reshape([n if d == dim else 1 for d in range(len(access.size))])
    return jnp.broadcast_to(place, access.size)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(i) for i in range(len(order))]
