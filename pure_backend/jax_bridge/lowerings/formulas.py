"""Which operators have torch's own formula for their derivative (`torch_derivative.py`).

Those whose formula is not the derivative of what computes the value: at ties, poles, zeros and infinities it says what eager
gives. An elementwise function used in every layer has its formula in its lowering instead, where it costs no trace.
"""

from __future__ import annotations

from typing import Any

from pure_backend.jax_bridge.lowerings.registry import names_of

_REDUCTIONS = {
    "cummax",
    "cummin",
    "dist",
    "linalg_vector_norm",
    "logcumsumexp",
    "mvlgamma",
    "renorm",
    "std",
    "std_mean",
    "var",
    "var_mean",
}
_SELECTIONS = {  # they have ties
    *(
        "amax",
        "amin",
        "fmax",
        "fmin",
        "kthvalue",
        "max",
        "maximum",
        "median",
        "min",
        "minimum",
        "mode",
        "nanmedian",
        "sort",
        "topk",
    ),
}
_ELEMENTWISE = {
    *(
        "_prelu_kernel",
        "arctan2",
        "atan2",
        "copysign",
        "fmod",
        "glu",
        "hypot",
        "i0",
        "i0e",
        "i1",
        "i1e",
        "lgamma",
        "logaddexp",
        "logaddexp2",
        "logit",
    ),
    *("polar", "remainder", "rsqrt", "sinc", "special_entr", "special_log_ndtr", "special_ndtri", "xlog1py", "xlogy"),
}
_LINEAR_ALGEBRA = {"cholesky_inverse", "cholesky_solve"}
_LOSSES = {"binary_cross_entropy", "huber_loss", "smooth_l1_loss"}
_NAMES = frozenset(_REDUCTIONS | _SELECTIONS | _ELEMENTWISE | _LINEAR_ALGEBRA | _LOSSES)


def has_torch_derivative(target: Any) -> bool:
    """Whether a node's target is such an operator."""
    return any(name.removeprefix("aten::").removeprefix("F.") in _NAMES for name in names_of(target))
