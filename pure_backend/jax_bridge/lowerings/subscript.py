"""Subscripts: `x[...]` and `x[...] = value`, and ATen's operators for them.

A subscript is a view (integers, slices, None) of which index tensors then pick elements. That order is torch's and not NumPy's:
an integer beside an index tensor is no index tensor. A mask stands for the places of its true elements, whose number is
known only when a program runs. Writing by one mask needs no more than a selection, or places of which those that the mask
does not have are out of range. What compares that number with another size, and may fail by it, is left to eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pure_backend.jax_bridge.lowerings import places
from pure_backend.jax_bridge.lowerings.registry import Site, lowers, unsupported
from pure_backend.jax_bridge.lowerings.values import as_array


@lowers("getitem")
def getitem(site: Site, x, index):
    """Python indexing: an element of a tuple, or a tensor's."""
    if isinstance(x, (tuple, list)):
        return x[index]
    view, tensors = _split(x, index)
    return _picked(site, _viewed(x, view), tensors)


@lowers("aten::index", "aten::_unsafe_index")
def aten_index(site: Site, x, indices):
    """Advanced indexing; None is a whole dimension."""
    return _picked(site, x, [_tensor(i) for i in indices])


@lowers("setitem")
def setitem(site: Site, x, index, value):
    """The new value of `x` after `x[index] = value`."""
    view, tensors = _split(x, index)
    value = as_array(value, x.dtype)
    if not _is_whole(view):
        value = _put(site, _viewed(x, view), tensors, value, "set")
        return places.write(x, view, value, wraps=True)
    return _put(site, x, tensors, value, "set")


@lowers("index_put", "aten::_unsafe_index_put", "aten::index_put", "index_put_")
def index_put(site: Site, x, indices, values, accumulate=False):
    """`x` with values put, or added, at indices; None is a whole dimension. The sum of bools is a logical or."""
    how = "set" if not accumulate else "max" if x.dtype == jnp.bool_ else "add"
    return _put(site, x, [_tensor(i) for i in indices], as_array(values, x.dtype), how)


# ---------------------------------------------------------------------------------------------------- parts of a subscript


def _split(x, index: Any) -> tuple[tuple, list]:
    """The view, and for each dimension of it None or an index tensor; a mask stands for all the dimensions that it covers."""
    parts = [_tensor(part) for part in (index if isinstance(index, tuple) else (index,))]
    rest = x.ndim - sum(map(_width, parts))
    view: list[Any] = []
    tensors: list[Any] = []
    for part in parts:
        if part is Ellipsis:
            view += [slice(None)] * rest
            tensors += [None] * rest
        elif part is None or isinstance(part, slice):
            view.append(part)
            tensors.append(None)
        elif not _is_mask(part) and jnp.ndim(part) == 0:
            view.append(part)
        else:  # a mask without dimensions picks from a new one
            view += [slice(None)] * _width(part) or [None]
            tensors.append(jnp.reshape(part, (1,)) if jnp.ndim(part) == 0 else part)
    return tuple(view), tensors


def _tensor(part: Any) -> Any:
    """A part of a subscript with lists as arrays, and uint8 masks as bool."""
    if isinstance(part, (list, range)):
        return jnp.asarray([_tensor(item) for item in part], dtype=None if len(part) else jnp.int64)
    if isinstance(part, jax.Array) and part.dtype == jnp.uint8:
        return part.astype(bool)
    return part


def _is_mask(part: Any) -> bool:
    return isinstance(part, bool) or (isinstance(part, jax.Array) and part.dtype == jnp.bool_)


def _width(part: Any) -> int:
    """How many dimensions of the tensor a part of its subscript covers."""
    return 0 if part is None or part is Ellipsis else jnp.ndim(part) if _is_mask(part) else 1


def _is_whole(view: Sequence[Any]) -> bool:
    return all(isinstance(part, slice) and part == slice(None) for part in view)


def _viewed(x, view: tuple):
    if any(isinstance(part, jax.Array) for part in view):  # of a value that is known at run time
        return places.read(x, view, wraps=True)
    return x if _is_whole(view) else x[view]


def _whole_dimensions(tensors: Sequence[Any]) -> tuple:
    return tuple(slice(None) if part is None else part for part in tensors)


def _picked(site: Site, x, tensors: Sequence[Any]):
    if any(map(_is_mask, tensors)):
        raise unsupported(site, "how many elements a mask picks is known only when it runs")
    return x if all(part is None for part in tensors) else places.read(x, _whole_dimensions(tensors), wraps=True)


# ---------------------------------------------------------------------------------------------------- writes


def _put(site: Site, x, tensors: Sequence[Any], value, how: str):
    """`x` with a value of its dtype combined in at index tensors, None for a whole dimension."""
    masks = [i for i, part in enumerate(tensors) if _is_mask(part)]
    others = [part for part in tensors if part is not None and not _is_mask(part)]
    if not masks:
        return _put_at(x, _whole_dimensions(tensors), value, how)
    if len(masks) > 1 or any(jnp.ndim(part) and jnp.shape(part)[-1] != 1 for part in others):
        raise unsupported(site, "a mask beside another mask or index: whether their sizes match is known only when it runs")
    if others:
        return _put_at_mask_and_others(x, tensors, masks[0], value, how)
    return _put_at_mask(x, masks[0], tensors[masks[0]], value, how)


def _put_at(x, index: tuple, value, how: str):
    target = jax.eval_shape(lambda a: a[index], x).shape
    return places.write(x, index, jnp.broadcast_to(_without_extra(value, len(target)), target), how, wraps=True)


def _without_extra(value, ndim: int):
    """Without the leading dimensions of size 1 that a value may have in excess."""
    return value.reshape(value.shape[max(value.ndim - ndim, 0) :])


def _put_at_mask(x, dim: int, mask, value, how: str):
    """A selection: one value for all true elements of a mask that begins at `dim`, or one for each of them, in order."""
    behind = x.ndim - dim - mask.ndim
    value = _without_extra(value, dim + 1 + behind)
    if value.ndim > behind:
        axis = value.ndim - behind - 1
        if value.shape[axis] != 1:
            value = jnp.take(_counted(value, axis, mask), jnp.cumsum(mask.reshape(-1)) - 1, axis, mode="clip")
        count = mask.shape if value.shape[axis] != 1 or mask.size == 1 else (1,) * mask.ndim
        value = value.reshape(*value.shape[:axis], *count, *value.shape[axis + 1 :])
    value = jnp.broadcast_to(value, x.shape)
    combined = {"set": lambda: value, "add": lambda: x + value, "max": lambda: x | value}[how]()
    return jnp.where(mask.reshape(*mask.shape, *(1,) * behind), combined, x)


def _put_at_mask_and_others(x, tensors: Sequence[Any], at: int, value, how: str):
    """A scatter at as many places as the mask has elements, those that are not true out of range."""
    mask = tensors[at]
    spots = jnp.nonzero(mask, size=mask.size, fill_value=max(x.shape, default=0))
    index = _whole_dimensions((*tensors[:at], *spots, *tensors[at + 1 :]))
    target = jax.eval_shape(lambda a: a[index], x).shape
    value = _without_extra(value, len(target))
    axis = value.ndim - len(target) + _axis_of_indices(index)
    if axis >= 0 and value.shape[axis] != 1:
        value = _counted(value, axis, mask)
        value = jnp.pad(value, [(0, mask.size - n if i == axis else 0) for i, n in enumerate(value.shape)])
    return places.write(x, index, jnp.broadcast_to(value, target), how, wraps=True)


def _axis_of_indices(index: tuple) -> int:
    """Where the last dimension of index tensors lies in what they pick: in their place, or first if they do not adjoin."""
    found = [i for i, part in enumerate(index) if not isinstance(part, slice)]
    adjoin = found[-1] - found[0] + 1 == len(found)
    return (found[0] if adjoin else 0) + max(jnp.ndim(index[i]) for i in found) - 1


def _counted(value, axis: int, mask):
    """A value for each true element of a mask; NaN if there are more or fewer, which is an error in eager."""
    if value.shape[axis] == 0 or not jnp.issubdtype(value.dtype, jnp.inexact):
        return value if value.shape[axis] else jnp.zeros((*value.shape[:axis], 1, *value.shape[axis + 1 :]), value.dtype)
    return jnp.where(jnp.count_nonzero(mask) == value.shape[axis], value, jnp.nan)
