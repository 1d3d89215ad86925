"""Factorizations and solvers.

Eager reads one triangle of a Hermitian matrix but differentiates as if it were symmetric; JAX averages the two triangles.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pure_backend.jax_bridge.lowerings.registry import Site, lowers, unsupported
from pure_backend.jax_bridge.lowerings.values import keep_gradient_of, wide


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of matrices."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _read_triangle(x: jax.Array, upper: bool) -> jax.Array:
    """The Hermitian matrix of one triangle of `x`, with the gradient of the mean of both."""
    half = jnp.triu(x, 1) if upper else jnp.tril(x, -1)
    diagonal = jnp.eye(x.shape[-1], dtype=x.dtype) * jnp.real(x).astype(x.dtype)
    return keep_gradient_of(half + adjoint(half) + diagonal, (x + adjoint(x)) / 2)


def _info(site: Site, failed: jax.Array) -> jax.Array:
    """LAPACK's `info`: zero for success; which pivot failed is not known, so that it is 1 for all failures."""
    return failed.astype(jnp.int32)


# ---------------------------------------------------------------------------------------------------- Cholesky


def _cholesky(x, upper: bool):
    return adjoint(_lower_cholesky(x, True)) if upper else _lower_cholesky(x, False)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _lower_cholesky(x, upper: bool):
    """The lower factor of the Hermitian matrix of one triangle of `x`."""
    return lax.linalg.cholesky(_read_triangle(x, upper), symmetrize_input=False)


@_lower_cholesky.defjvp
def _lower_cholesky_jvp(upper, primals, tangents):
    """JAX's own rule takes the change to be Hermitian; torch's gradient is that of any change."""
    lower = _lower_cholesky(primals[0], upper)
    half = lax.linalg.triangular_solve(lower, tangents[0], left_side=True, lower=True)
    change = lax.linalg.triangular_solve(lower, half, left_side=False, lower=True, transpose_a=True, conjugate_a=True)
    return lower, lower @ ((jnp.tril(change) + jnp.tril(adjoint(change), -1)) / 2)


@lowers("cholesky", "linalg_cholesky")
def cholesky(site: Site, x, upper=False):
    """The triangular factor of a positive definite matrix."""
    return _cholesky(x, upper)


@lowers("linalg_cholesky_ex")
def cholesky_ex(site: Site, x, upper=False, check_errors=False):
    """`(factor, info)`."""
    factor = _cholesky(x, upper)
    return factor, _info(site, jnp.any(jnp.isnan(factor), axis=(-1, -2)))


# ---------------------------------------------------------------------------------------------------- eigenvalues


@lowers("linalg_eigh", "aten::_linalg_eigh")
def eigh(site: Site, x, UPLO="L", compute_v=True):
    """`(eigenvalues, eigenvectors)` of Hermitian matrices, in ascending order."""
    x = _read_triangle(x, UPLO.upper() == "U")
    vectors, values = lax.linalg.eigh(x, lower=True, symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros(tuple(site.out[1].shape), x.dtype)


@lowers("linalg_eigvalsh")
def eigvalsh(site: Site, x, UPLO="L"):
    """Eigenvalues of Hermitian matrices."""
    x = _read_triangle(x, UPLO.upper() == "U")
    return lax.linalg.eigh(x, lower=True, symmetrize_input=False)[1]


@jax.custom_jvp
def _eig(x):
    """`(eigenvalues, eigenvectors)`, complex, the eigenvectors of length one."""
    values, vectors = lax.linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=True)
    return values, vectors


@_eig.defjvp
def _eig_jvp(primals, tangents):
    """The first-order change that keeps eigenvectors of length one, as torch's `linalg_eig_jvp`."""
    values, vectors = _eig(*primals)
    change = jnp.linalg.solve(vectors, tangents[0].astype(vectors.dtype) @ vectors)
    gaps = values[..., None, :] - values[..., :, None]
    same = jnp.eye(values.shape[-1], dtype=bool)
    moved = vectors @ jnp.where(same, 0, change / jnp.where(same, 1, gaps))
    along = jnp.real(jnp.sum(jnp.conj(vectors) * moved, axis=-2, keepdims=True))
    return (values, vectors), (jnp.diagonal(change, axis1=-2, axis2=-1), moved - vectors * along)


@lowers("linalg_eig", "aten::linalg_eig")
def eig(site: Site, x):
    """`(eigenvalues, eigenvectors)` of square matrices."""
    return _eig(x)


@lowers("linalg_eigvals", "aten::_linalg_eigvals")
def eigvals(site: Site, x):
    """Eigenvalues of square matrices."""
    return _eig(x)[0]


# ---------------------------------------------------------------------------------------------------- singular values


@lowers("linalg_svd", "aten::_linalg_svd")
def svd(site: Site, x, full_matrices=None, compute_uv=True, *, driver=None):
    """`(U, S, Vh)`. The columns that complete full matrices carry no gradient, as in torch."""
    if not compute_uv:
        empty = (jnp.zeros(tuple(site.out[i].shape), x.dtype) for i in (0, 2))
        return next(empty), _singular_values(x), next(empty)
    u, s, vh = lax.linalg.svd(x, full_matrices=False)
    k = s.shape[-1]
    if tuple(site.out[0].shape[-2:]) != u.shape[-2:] or tuple(site.out[2].shape[-2:]) != vh.shape[-2:]:
        whole_u, _, whole_vh = lax.linalg.svd(lax.stop_gradient(x), full_matrices=True)
        u = jnp.concatenate([u, whole_u[..., :, k:]], axis=-1)
        vh = jnp.concatenate([vh, whole_vh[..., k:, :]], axis=-2)
    return u, s, vh


def _singular_values(x):
    """Through thin factors, because those of values alone have no gradient of higher order."""
    return lax.linalg.svd(x, full_matrices=False)[1]


@lowers("linalg_svdvals")
def svdvals(site: Site, x, *, driver=None):
    """Singular values."""
    return _singular_values(x)


# ---------------------------------------------------------------------------------------------------- LU


def _factor(site: Site, x, pivot: bool):
    """`(LU, pivots counted from 1, permutation)`."""
    if not pivot:
        raise unsupported(site, "JAX has no LU factorization without pivoting")
    factors, pivots, permutation = lax.linalg.lu(x)
    return factors, pivots.astype(jnp.int32) + 1, permutation


def _singular(factors):
    return jnp.any(jnp.diagonal(factors, axis1=-2, axis2=-1) == 0, axis=-1)


@lowers("linalg_lu_factor_ex")
def lu_factor_ex(site: Site, x, pivot=True, check_errors=False):
    """`(LU, pivots, info)`."""
    factors, pivots, _ = _factor(site, x, pivot)
    return factors, pivots, _info(site, _singular(factors))


@lowers("linalg_lu_factor")
def lu_factor(site: Site, x, pivot=True):
    """`(LU, pivots)`."""
    return _factor(site, x, pivot)[:2]


@lowers("linalg_lu")
def lu(site: Site, x, pivot=True):
    """`(P, L, U)` with `x = P @ L @ U`."""
    factors, _, permutation = _factor(site, x, pivot)
    return _permutation_matrix(permutation, x.dtype), *_triangles(factors)


@lowers("lu_unpack")
def lu_unpack(site: Site, data, pivots, unpack_data=True, unpack_pivots=True):
    """`(P, L, U)` of what `lu_factor` gives; what is not asked for is empty."""
    p, lower, upper = (jnp.zeros(tuple(out.shape), data.dtype) for out in site.out)
    if unpack_pivots:
        p = _permutation_matrix(lax.linalg.lu_pivots_to_permutation(pivots - 1, data.shape[-2]), data.dtype)
    return (p, *_triangles(data)) if unpack_data else (p, lower, upper)


def _triangles(factors):
    rows, columns = factors.shape[-2:]
    k = min(rows, columns)
    lower = jnp.tril(factors[..., :, :k], -1) + jnp.eye(rows, k, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :k, :])


def _permutation_matrix(permutation, dtype):
    return jnp.swapaxes(jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype), -1, -2)


@lowers("linalg_lu_solve")
def lu_solve(site: Site, factors, pivots, b, *, left=True, adjoint=False):
    """`x` with `A x = b` (or `x A = b`, or with the adjoint of `A`) for a factorized `A`."""
    if not left:  # x A = b is A^H x^H = b^H
        return _adjoint_of(_solve_factors(factors, pivots, _adjoint_of(b), not adjoint))
    return _solve_factors(factors, pivots, b, adjoint)


_adjoint_of = adjoint


def _solve_factors(factors, pivots, b, of_adjoint: bool):
    batch = jnp.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    factors = jnp.broadcast_to(factors, (*batch, *factors.shape[-2:]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, factors.shape[-2])
    permutation = jnp.broadcast_to(permutation, (*batch, permutation.shape[-1]))[..., None]
    if not of_adjoint:
        y = _triangular(factors, jnp.take_along_axis(b, permutation, axis=-2), lower=True, unit_diagonal=True)
        return _triangular(factors, y, lower=False)
    y = _triangular(factors, b, lower=False, transpose_a=True, conjugate_a=True)
    y = _triangular(factors, y, lower=True, unit_diagonal=True, transpose_a=True, conjugate_a=True)
    return jnp.take_along_axis(y, jnp.argsort(permutation, axis=-2), axis=-2)


def _triangular(a, b, **kwargs):
    return lax.linalg.triangular_solve(a, b, left_side=True, **kwargs)


# ---------------------------------------------------------------------------------------------------- solvers


def _solve(a, b, left: bool):
    """`x` with `a x = b` or `x a = b`, `b` a vector or a matrix as torch tells them."""
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    b = b[..., None] if vector else b
    if not left:
        return jnp.swapaxes(_solve(jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2), True), -1, -2)
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    x = jnp.linalg.solve(jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:])))
    return x[..., 0] if vector else x


@lowers("linalg_solve")
def solve(site: Site, a, b, *, left=True):
    """The solution of a linear system."""
    return _solve(a, b, left)


@lowers("linalg_solve_ex")
def solve_ex(site: Site, a, b, *, left=True, check_errors=False):
    """`(solution, info)`."""
    return _solve(a, b, left), _info(site, _singular(lax.linalg.lu(lax.stop_gradient(a))[0]))


@lowers("aten::_linalg_solve_ex")
def aten_solve_ex(site: Site, a, b, *, left=True, check_errors=False):
    """`(solution, LU, pivots, info)`."""
    factors, pivots, _ = _factor(site, lax.stop_gradient(a), True)
    return _solve(a, b, left), factors, pivots, _info(site, _singular(factors))


@lowers("inverse", "linalg_inv")
def inverse(site: Site, x):
    """The inverse of square matrices."""
    return jnp.linalg.inv(x)


@lowers("linalg_inv_ex")
def inv_ex(site: Site, x, *, check_errors=False):
    """`(inverse, info)`."""
    return jnp.linalg.inv(x), _info(site, _singular(lax.linalg.lu(lax.stop_gradient(x))[0]))


@lowers("linalg_solve_triangular")
def solve_triangular(site: Site, a, b, *, upper, left=True, unitriangular=False):
    """The solution of a triangular system."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(m, (*batch, *m.shape[-2:])) for m in (a, b))
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@lowers("triangular_solve")
def triangular_solve(site: Site, b, a, upper=True, transpose=False, unitriangular=False):
    """`(solution, a)`."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    wide_a, b = (jnp.broadcast_to(m, (*batch, *m.shape[-2:])) for m in (a, b))
    return _triangular(wide_a, b, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular), wide_a


# ---------------------------------------------------------------------------------------------------- determinants


@lowers("linalg_slogdet", "slogdet")
def slogdet(site: Site, x):
    """`(sign, log of the absolute determinant)`."""
    sign, log = jnp.linalg.slogdet(x)
    return sign, log


@lowers("aten::_linalg_slogdet")
def aten_slogdet(site: Site, x):
    """`(sign, log of the absolute determinant, LU, pivots)`."""
    sign, log = jnp.linalg.slogdet(x)
    return sign, log, *_factor(site, lax.stop_gradient(x), True)[:2]


@lowers("aten::_linalg_det")
def aten_det(site: Site, x):
    """`(determinant, LU, pivots)`."""
    determinant = jnp.linalg.det(x) if x.shape[-1] else jnp.ones(x.shape[:-2], x.dtype)
    return determinant, *_factor(site, lax.stop_gradient(x), True)[:2]


# ---------------------------------------------------------------------------------------------------- others


@lowers("linalg_householder_product", "orgqr")
def householder_product(site: Site, x, tau):
    """The first columns of the product of the reflectors whose vectors are below the diagonal of `x`."""
    rows, columns = x.shape[-2:]
    product = jnp.broadcast_to(jnp.eye(rows, columns, dtype=x.dtype), x.shape)
    for i in reversed(range(tau.shape[-1])):
        product = product - _reflected(x, tau, i, product)
    return product


def _reflected(x, tau, i: int, y):
    """`tau * v v^H y` for the `i`-th reflector."""
    below = jnp.where(jnp.arange(x.shape[-2]) > i, x[..., :, i], 0)
    vector = below.at[..., i].set(1)
    return tau[..., i, None, None] * vector[..., :, None] * (jnp.conj(vector)[..., None, :] @ y)


@lowers("ormqr")
def ormqr(site: Site, x, tau, other, left=True, transpose=False):
    """The product of `other` with the square matrix of the reflectors of `x`, or its adjoint."""
    if not left:  # other Q is (Q^H other^H)^H
        return adjoint(_times_reflectors(x, tau, adjoint(other), not transpose))
    return _times_reflectors(x, tau, other, transpose)


def _times_reflectors(x, tau, y, of_adjoint: bool):
    order = range(tau.shape[-1]) if of_adjoint else reversed(range(tau.shape[-1]))
    for i in order:
        y = y - _reflected(x, jnp.conj(tau) if of_adjoint else tau, i, y)
    return y


@lowers("matrix_exp", "linalg_matrix_exp")
def matrix_exp(site: Site, x):
    """The exponential of square matrices."""
    if x.size == 0:
        return x
    flat = wide(x).reshape(-1, *x.shape[-2:])
    return jax.vmap(jax.scipy.linalg.expm)(flat).reshape(x.shape)


@lowers("linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_ldl_solve")
def ldl(site: Site, *args, **kwargs):
    """JAX has none with pivots."""
    raise unsupported(site, "JAX has no pivoted LDL factorization")


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pseudo_inverse(x, hermitian: bool, atol, rtol):
    """The inverse on the space of the singular values above `max(atol, rtol * the largest)`."""
    if hermitian:
        values, vectors = jnp.linalg.eigh(_read_triangle(x, False), symmetrize_input=False)
        left, right, size = vectors, adjoint(vectors), jnp.abs(values)
    else:
        left, values, right = lax.linalg.svd(x, full_matrices=False)
        size = values
    limit = jnp.maximum(atol, rtol * jnp.max(size, axis=-1))[..., None]
    inverse_values = jnp.where(size > limit, 1 / jnp.where(size > limit, values, 1), 0)
    return (adjoint(right) * inverse_values[..., None, :]) @ adjoint(left)


@_pseudo_inverse.defjvp
def _pseudo_inverse_jvp(hermitian, primals, tangents):
    """Golub and Pereyra's rule, which needs no distinct singular values."""
    x, atol, rtol = primals
    p, change = _pseudo_inverse(x, hermitian, atol, rtol), adjoint(tangents[0])
    within = jnp.eye(x.shape[-2], dtype=x.dtype) - x @ p
    without = jnp.eye(x.shape[-1], dtype=x.dtype) - p @ x
    return p, -p @ tangents[0] @ p + p @ adjoint(p) @ change @ within + without @ change @ adjoint(p) @ p


@lowers("linalg_pinv")
def pinv(site: Site, x, rcond=None, hermitian=False, *, atol=None, rtol=None):
    """The pseudo-inverse, by relative and absolute tolerance or by their old name `rcond`."""
    if x.size == 0:
        return jnp.swapaxes(x, -1, -2)
    real = jnp.finfo(x.dtype).dtype
    rtol = rcond if rtol is None else rtol
    given = rtol is not None
    relative = jnp.asarray(rtol if given else max(x.shape[-2:]) * jnp.finfo(x.dtype).eps, real)
    absolute = jnp.asarray(0 if atol is None else atol, real)
    relative = relative if given else jnp.where(absolute > 0, 0, relative)
    return _pseudo_inverse(x, hermitian, absolute, relative)


@lowers("pinverse")
def pinverse(site: Site, x, rcond=1e-15):
    """The pseudo-inverse under its old name."""
    return pinv(site, x, rcond)


@lowers("aten::linalg_pinv.atol_rtol_tensor")
def pinv_by_tensors(site: Site, x, *, atol=None, rtol=None, hermitian=False):
    """What the other forms come to."""
    return pinv(site, x, None, hermitian, atol=atol, rtol=rtol)


@lowers("cholesky_solve", "aten::_cholesky_solve_helper")
def cholesky_solve(site: Site, b, factor, upper=False):
    """The solution for a matrix of which one triangle of `factor` is the factor; the other is not read."""
    lower = jnp.tril(adjoint(factor) if upper else factor)
    shape = jnp.broadcast_shapes(b.shape[:-2], lower.shape[:-2])
    lower, b = (jnp.broadcast_to(a, (*shape, *a.shape[-2:])) for a in (lower, b))
    half = lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)
    return lax.linalg.triangular_solve(lower, half, left_side=True, lower=True, transpose_a=True, conjugate_a=True)


@lowers("cholesky_inverse")
def cholesky_inverse(site: Site, factor, upper=False):
    """The inverse of a matrix of which one triangle of `factor` is the factor."""
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return cholesky_solve(site, identity, factor, upper)
