"""Operators that act on each element: arithmetic, comparison, logic, selection, conversion."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from torch import fx

from pure_backend.errors import PureBackendError
from pure_backend.ir.describe import source_line
from pure_backend.ir.facts import facts
from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import (
    COPY,
    angle,
    as_array,
    in_f32,
    is_number,
    keep_gradient_of,
    keeps_f32,
    magnitude,
    sgn,
    wide,
    wide_dtype,
    with_tangent,
)

_UNARY = {
    "abs": magnitude,
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "angle": angle,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "lgamma": lax.lgamma,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": with_tangent(jnp.log2, lambda x, t: t / x * (1 / math.log(2))),  # XLA would join two divisors, and underflow
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "sin": jnp.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "deg2rad": jnp.deg2rad,
    "rad2deg": jnp.rad2deg,
}
_EXACT = {
    "ceil": jnp.ceil,
    "conj_physical": jnp.conj,
    "conj": jnp.conj,
    "floor": jnp.floor,
    "frac": lambda x: x - jnp.trunc(x),
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "isneginf": jnp.isneginf,
    "isposinf": jnp.isposinf,
    "neg": lambda x: -x,
    "negative": lambda x: -x,
    "positive": lambda x: x,
    "resolve_conj": lambda x: x,
    "resolve_neg": lambda x: x,
    "sgn": sgn,
    "sign": lambda x: x if x.dtype == jnp.bool_ else jnp.where(jnp.isnan(x), 0, jnp.sign(x)),  # torch: the sign of NaN is 0
    "signbit": jnp.signbit,
    "square": lambda x: x * x,
    "trunc": jnp.trunc,
    "fix": jnp.trunc,
    "real": jnp.real,
    "imag": jnp.imag,
    "bitwise_not": jnp.bitwise_not,
    "logical_not": jnp.logical_not,
}
_ARITHMETIC = {
    "remainder": jnp.remainder,
    "fmod": jnp.fmod,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "atan2": jnp.arctan2,
    "arctan2": jnp.arctan2,
    "hypot": jnp.hypot,
    "copysign": jnp.copysign,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "nextafter": lambda x, y: keep_gradient_of(jnp.nextafter(lax.stop_gradient(x), lax.stop_gradient(y)), x),
}
# What 16-bit floats give as they are is right: it is one of the operands, or a neighbour.
_ROUNDED_ONCE = {_ARITHMETIC[name] for name in ("maximum", "minimum", "fmax", "fmin", "copysign", "nextafter")}
_COMPARISON = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "not_equal": jnp.not_equal,
    "greater": jnp.greater,
    "greater_equal": jnp.greater_equal,
    "less": jnp.less,
    "less_equal": jnp.less_equal,
}
_LOGIC = {"logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor}


def _unary(fn):
    def lower(site: Site, x):
        x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(site.dtype)
        return fn(wide(x)).astype(site.dtype)

    return lower


def _arithmetic(fn):
    def lower(site: Site, x, y):
        x, y = as_array(x, site.dtype), as_array(y, site.dtype)
        return fn(x, y) if fn in _ROUNDED_ONCE else fn(wide(x), wide(y))

    return lower


def _comparison(fn):
    def lower(site: Site, x, y):
        dtype = site.promoted(*site.args[:2])
        return fn(as_array(x, dtype), as_array(y, dtype))

    return lower


for _name, _fn in _UNARY.items():
    lowers(_name)(_unary(_fn))
for _name, _fn in _EXACT.items():
    lowers(_name)(lambda site, x, fn=_fn: fn(x))
for _name, _fn in _ARITHMETIC.items():
    lowers(_name)(_arithmetic(_fn))
for _name, _fn in _COMPARISON.items():
    lowers(_name)(_comparison(_fn))
for _name, _fn in _LOGIC.items():
    lowers(_name)(lambda site, x, y, fn=_fn: fn(as_array(x, bool), as_array(y, bool)))


@lowers("mul", "multiply")
def mul(site: Site, x, y):
    """`x * y`."""
    if keeps_f32(y, site.dtype):
        return in_f32(x, site.dtype) * y
    return in_f32(y, site.dtype) * x if keeps_f32(x, site.dtype) else as_array(x, site.dtype) * as_array(y, site.dtype)


@lowers("add")
def add(site: Site, x, y, alpha=1):
    """`x + alpha * y`; on bools a logical or."""
    if site.dtype == jnp.bool_:
        return jnp.logical_or(as_array(x, bool), jnp.logical_and(as_array(y, bool), bool(alpha)))
    x, y = as_array(x, site.dtype), as_array(y, site.dtype)
    return x + y if is_number(alpha, 1) else wide(x) + _factor(alpha, site.dtype) * wide(y)


@lowers("sub", "subtract")
def sub(site: Site, x, y, alpha=1):
    """`x - alpha * y`."""
    x, y = as_array(x, site.dtype), as_array(y, site.dtype)
    return x - y if is_number(alpha, 1) else wide(x) - _factor(alpha, site.dtype) * wide(y)


def _factor(value, dtype):
    """A scalar argument in the type that is computed in."""
    return as_array(value, wide_dtype(dtype))


@lowers("rsub")
def rsub(site: Site, x, y, alpha=1):
    """`y - alpha * x`."""
    return sub(site, y, x, alpha)


@lowers("div", "divide")
def div(site: Site, x, y, rounding_mode=None):
    """Division; `rounding_mode` "trunc" or "floor" keeps the promoted dtype."""
    if site.writes and rounding_mode is None and not jnp.issubdtype(site.dtype, jnp.inexact):
        raise PureBackendError(f"a quotient can't be written in place to a {site.dtype} tensor\n  at {source_line(site.node)}")
    x = as_array(x, site.dtype)
    y = in_f32(y, site.dtype) if keeps_f32(y, site.dtype) else as_array(y, site.dtype)
    if rounding_mode == "floor":
        return jnp.floor_divide(wide(x), wide(y))
    if rounding_mode == "trunc":
        return lax.div(*jnp.broadcast_arrays(x, y)) if jnp.issubdtype(x.dtype, jnp.integer) else jnp.trunc(wide(x) / wide(y))
    return x / y if x.dtype == y.dtype else wide(x) / y


@lowers("true_divide")
def true_divide(site: Site, x, y):
    """`x / y`."""
    return div(site, x, y)


@lowers("floor_divide")
def floor_divide(site: Site, x, y):
    """`x // y`."""
    return div(site, x, y, "floor")


@lowers("pow", "float_power")
def power(site: Site, x, y):
    """Power; an exponent known at compile time stays one, so that `x ** 2` is a product."""
    if jnp.issubdtype(site.dtype, jnp.integer) and (isinstance(y, jax.Array) or y < 0):
        return _integer_power(*jnp.broadcast_arrays(as_array(x, site.dtype), as_array(y, site.dtype)))
    if isinstance(y, (int, float)) and float(y).is_integer() and abs(y) < 2**31 and isinstance(x, jax.Array):
        x = as_array(x, site.dtype)
        return lax.integer_pow(x if y == 2 else wide(x), int(y))
    x = wide(as_array(x, site.dtype))
    if isinstance(y, float) and y == 0.5:  # as torch does, which matters for -inf and -0
        return jnp.sqrt(x)
    return _power(x, wide(as_array(y, site.dtype)))


@jax.custom_jvp
def _power(x, y):
    return jnp.power(x, y)


@_power.defjvp
def _(primals, tangents):
    """Torch's: by the base 0 where the exponent is 0, by the exponent 0 where the base is 0 and the exponent not negative."""
    x, y = primals
    result = _power(x, y)
    by_base = jnp.where(y == 0, 0, y * jnp.power(x, y - 1))
    by_exponent = jnp.where((x == 0) & (jnp.real(y) >= 0), 0, result * jnp.log(x))
    return result, tangents[0] * by_base + tangents[1] * by_exponent


def _integer_power(x, y):
    """Integer power that wraps; for a negative exponent the quotient, which is 0 unless the base is 1 or -1."""
    odd = jnp.where(y % 2 == 0, 1, x).astype(x.dtype)
    return jnp.where(y < 0, jnp.where(x == 1, 1, jnp.where(x + 1 == 0, odd, 0)).astype(x.dtype), _wrapping_power(x, y))


def _wrapping_power(x, y):
    """By squaring, as many times as the largest exponent has bits; a negative exponent counts as 0."""

    def square(state):
        product, base, left = state
        return jnp.where(left % 2 == 1, product * base, product), base * base, left // 2

    state = jnp.ones_like(x), x, jnp.maximum(y, 0)
    return lax.while_loop(lambda state: jnp.any(state[2] > 0), square, state)[0]


@lowers("where")
def where(site: Site, condition, x, y):
    """Selection by a bool condition."""
    return jnp.where(condition.astype(bool), as_array(x, site.dtype), as_array(y, site.dtype))


@lowers("masked_fill")
def masked_fill(site: Site, x, mask, value):
    """`value` where `mask`, `x` elsewhere."""
    return jnp.where(mask, as_array(value, site.dtype), x)


@lowers("clamp", "clip")
def clamp(site: Site, x, min=None, max=None):
    """Values limited to `[min, max]`; NaN stays NaN."""
    x = as_array(x, site.dtype)
    if not jnp.issubdtype(site.dtype, jnp.inexact):
        return jnp.clip(x, *(None if end is None else as_array(end, site.dtype) for end in (min, max)))
    if max is None:
        return x if min is None else at_least(x, as_array(min, site.dtype))
    high = as_array(max, site.dtype)
    return _at_most(x, high) if min is None else _limited(x, as_array(min, site.dtype), high)


# Their derivatives are torch's: at a bound the whole gradient passes and not half of it, and a NaN has none. Where the bounds
# meet, the lower one has no gradient either; where they cross, the upper one counts.


@jax.custom_jvp
def at_least(x, low):
    """The larger of `x` and its lower limit."""
    return jnp.maximum(x, low)


@at_least.defjvp
def _(primals, tangents):
    x, low = primals
    return at_least(x, low), jnp.where(x >= low, tangents[0], 0) + jnp.where(x < low, tangents[1], 0)


@jax.custom_jvp
def _at_most(x, high):
    return jnp.minimum(x, high)


@_at_most.defjvp
def _(primals, tangents):
    x, high = primals
    return _at_most(x, high), jnp.where(x <= high, tangents[0], 0) + jnp.where(x > high, tangents[1], 0)


@jax.custom_jvp
def _limited(x, low, high):
    return jnp.minimum(jnp.maximum(x, low), high)


@_limited.defjvp
def _(primals, tangents):
    x, low, high = primals
    inside = jnp.where((x >= low) & (x <= high), tangents[0], 0)
    below = jnp.where((x < low) & (low < high), tangents[1], 0)
    return _limited(*primals), inside + below + jnp.where((x > high) | (high < low), tangents[2], 0)


@lowers("clamp_min")
def clamp_min(site: Site, x, min):
    """Lower limit."""
    return clamp(site, x, min)


@lowers("clamp_max")
def clamp_max(site: Site, x, max):
    """Upper limit."""
    return clamp(site, x, None, max)


@lowers("prims::fma")
def fma(site: Site, x, y, z):
    """`x * y + z`."""
    return x * y + z


@lowers("lerp")
def lerp(site: Site, start, end, weight):
    """`start + weight * (end - start)`, counted from the nearer of the two, so that a weight of 1 is `end` exactly."""
    start, end = wide(as_array(start, site.dtype)), wide(as_array(end, site.dtype))
    weight = _factor(weight, site.dtype) if isinstance(weight, (int, float)) else wide(as_array(weight, site.dtype))
    near = jnp.abs(weight) < 0.5
    return jnp.where(near, start, end) + jnp.where(near, weight, weight - 1) * (end - start)


@lowers("addcmul")
def addcmul(site: Site, x, a, b, *, value=1):
    """`x + value * a * b`."""
    x, a, b = (wide(as_array(v, site.dtype)) for v in (x, a, b))
    return x + _factor(value, site.dtype) * a * b


@lowers("addcdiv")
def addcdiv(site: Site, x, a, b, *, value=1):
    """`x + value * a / b`."""
    x, a, b = (wide(as_array(v, site.dtype)) for v in (x, a, b))
    return x + _factor(value, site.dtype) * a / b


@lowers("round")
def round_(site: Site, x, decimals=0):
    """Rounds half to even."""
    return jnp.round(x, decimals)


@lowers("nan_to_num")
def nan_to_num(site: Site, x, nan=0.0, posinf=None, neginf=None):
    """Finite values in the place of NaN and infinities."""
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@lowers("to", "type", "type_as", "float", "half", "double", "bfloat16", "int", "long", "short", "bool", "char", "byte")
def convert(site: Site, x, *args, **kwargs):
    """Conversion: torch's own result says to which dtype; where it lives is the runtime's business."""
    return as_array(x, site.dtype)


lowers(
    "aten::_to_copy",
    "prims::convert_element_type",
    "cfloat",
    "cdouble",
    "cpu",
    "cuda",
    "alias",
    "aten::clone",
    "aten::contiguous",
)(convert)


@lowers("clone", "contiguous")
def copied(site: Site, x):
    """A copy. One of an input's memory is a value of its own: as a residual it is not the input, which may be written later."""
    source = _storage(site.node.all_input_nodes[0])
    copies = source is not None and source != _storage(site.node)
    of_input = copies and any(_storage(p) == source for p in site.node.graph.find_nodes(op="placeholder"))
    return checkpoint_name(x, COPY) if of_input else x


def _storage(node: fx.Node) -> int | None:
    lies = facts(node).geometry
    return None if lies is None else lies.storage


lowers("aten::lift_fresh", "aten::lift_fresh_copy", "aten::detach", "aten::view_of")(convert)
lowers("aten::_conj_physical")(lambda site, x: jnp.conj(x))
lowers("_conj", "aten::_conj")(lambda site, x: jnp.conj(x))
lowers("aten::_neg_view", "_neg_view")(lambda site, x: -x)


@lowers("detach", "aten::detach_copy", "_get_data_attr")
def detach(site: Site, x):
    """The value without its gradient."""
    return lax.stop_gradient(x)


@lowers("complex")
def complex_(site: Site, real, imag):
    """A complex number of two real ones."""
    return lax.complex(real, imag)


@lowers("polar")
def polar(site: Site, abs, angle):
    """A complex number of length and angle."""
    return lax.complex(abs * jnp.cos(angle), abs * jnp.sin(angle))


@lowers("view_as_complex")
def view_as_complex(site: Site, x):
    """`f[..., 2]` as `c[...]`."""
    return lax.complex(x[..., 0], x[..., 1])


@lowers("view_as_real")
def view_as_real(site: Site, x):
    """`c[...]` as `f[..., 2]`."""
    return jnp.stack([x.real, x.imag], axis=-1)


@lowers("copy_", "copy")
def copy_(site: Site, x, source, non_blocking=False):
    """The source, in the target's shape and dtype."""
    return jnp.broadcast_to(as_array(source, x.dtype), x.shape)


@lowers("fill_", "fill")
def fill_(site: Site, x, value):
    """One value everywhere."""
    return jnp.broadcast_to(as_array(value, x.dtype), x.shape)


@lowers("zero_", "zero")
def zero_(site: Site, x):
    """Zero everywhere."""
    return jnp.zeros_like(x)
