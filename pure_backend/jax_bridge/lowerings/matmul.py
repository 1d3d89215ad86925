"""Products. Each is one `dot_general` that keeps the caller's dimensions: nothing is merged by a reshape, because a merged
dimension stops sharding propagation and costs time on TPU (pytorch/xla issue 8713)."""

from __future__ import annotations

import string

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.lowerings.registry import Site, lowers
from pure_backend.jax_bridge.lowerings.values import as_array, is_number, wide_dtype


def _same(site: Site, *operands):
    return [operand.astype(site.dtype) for operand in operands]


@lowers("F.linear", "aten::linear")
def linear(site: Site, x, weight, bias=None):
    """`x @ weight.T + bias` for `x: f[..., in]`, `weight: f[out, in]`."""
    x, weight = _same(site, x, weight)
    out = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return out if bias is None else out + bias.astype(site.dtype)


@lowers("matmul", "mm", "bmm", "mv", "dot", "linalg_matmul")
def matmul(site: Site, x, y):
    """Matrix product with broadcast batch dimensions."""
    return jnp.matmul(*_same(site, x, y))


@lowers("aten::_int_mm", "_int_mm")
def int_mm(site: Site, x, y):
    """`x: i8[n, k] @ y: i8[k, m]`, summed in i32; `x` may be u8, which no product of bytes takes beside i8."""
    if x.dtype != y.dtype:
        x, y = x.astype(jnp.int32), y.astype(jnp.int32)
    return jnp.matmul(x, y, preferred_element_type=jnp.int32)


@lowers("addmm", "baddbmm", "addmv")
def addmm(site: Site, bias, x, y, *, beta=1, alpha=1):
    """`beta * bias + alpha * (x @ y)`; with factors 16-bit floats are rounded at the end only."""
    dtype = site.dtype if is_number(alpha, 1) and is_number(beta, 1) else wide_dtype(site.dtype)
    product = jnp.matmul(*_same(site, x, y), preferred_element_type=dtype)
    product = product if is_number(alpha, 1) else product * as_array(alpha, dtype)
    if is_number(beta, 0):
        return product
    bias = bias.astype(site.dtype).astype(dtype)
    if product.shape != tuple(site.out.shape):  # torch leaves the bias as it is beside a product of nothing
        product = jnp.zeros(tuple(site.out.shape), dtype)
    return product + (bias if is_number(beta, 1) else bias * as_array(beta, dtype))


@lowers("outer", "ger")
def outer(site: Site, x, y):
    """Outer product."""
    return jnp.outer(*_same(site, x, y))


@lowers("einsum")
def einsum(site: Site, equation, *operands):
    """Einstein summation, string and sublist form."""
    if isinstance(equation, jax.Array):
        equation, operands = _from_sublists((equation, *operands))
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    return jnp.einsum(equation.replace(" ", ""), *_same(site, *operands))


def _from_sublists(args):
    letters = string.ascii_letters
    operands, terms, rest = [], [], list(args)
    while len(rest) > 1:
        operands.append(rest.pop(0))
        terms.append("".join("..." if i is Ellipsis else letters[i] for i in rest.pop(0)))
    out = "->" + "".join("..." if i is Ellipsis else letters[i] for i in rest[0]) if rest else ""
    return ",".join(terms) + out, operands


@lowers("tensordot")
def tensordot(site: Site, a, b, dims=2, out=None):
    """Contraction over several dimensions."""
    if not isinstance(dims, int):
        inner = [(a.shape[i], b.shape[j]) for i, j in zip(*dims, strict=True)]
        if any(m != n for m, n in inner):  # torch sums the longer one where the other has one element
            return NotImplemented
    return jnp.tensordot(*_same(site, a, b), axes=dims)


@lowers("transformers::grouped_mm_fallback", "aten::_grouped_mm")
def grouped_mm(site: Site, x, weight, offs, *args, **kwargs):
    """Rows of `x: f[rows, in]` by the expert whose group they are in: `weight: f[experts, in, out]`, group ends `offs`."""
    if x.ndim != 2 or weight.ndim != 3 or args or kwargs:
        return NotImplemented
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=jnp.zeros((1,), jnp.int32))
    return lax.ragged_dot(*_same(site, x, weight), sizes)


@lowers("F.bilinear", "bilinear")
def bilinear(site: Site, x1, x2, weight, bias=None):
    """`x1 @ weight[k] @ x2`."""
    out = jnp.einsum("...i,kij,...j->...k", *_same(site, x1, weight, x2))
    return out if bias is None else out + bias
