"""Numbers at which formulas break: zeros, poles, ties, bounds, infinities, NaN."""

import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, compiled
from torch import nn

INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max


def tensor(values, grad=True) -> torch.Tensor:
    return torch.tensor(values, requires_grad=grad)


# Function, values of its arguments (each requires grad).
DERIVATIVES = {
    "cross entropy of certainty": (lambda x: F.binary_cross_entropy(x.sigmoid(), x.new_tensor([1.0, 0.0])), [20.0, -120.0]),
    "cross entropy of infinite logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.tensor([1.0, 0.0, 0.0]), reduction="sum"),
        [INF, -INF, 300.0],
    ),
    "x log y at zeros": (torch.xlogy, [0.0, 0.0, 1.0, 0.0, NAN], [0.3, 0.0, 2.0, -1.0, 0.5]),
    "x log1p y at zeros": (torch.special.xlog1py, [0.0, 0.0, 1.0], [-0.7, -1.0, 2.0]),
    "distance of equals": (lambda x: torch.dist(x, x.detach()), [1.0, 2.0]),
    "distance of equals, one norm": (lambda x: torch.dist(x, x.detach(), 1), [1.0, 2.0]),
    "distance of equals, third norm": (lambda x: torch.dist(x, x.detach(), 3), [1.0, 2.0]),
    "distance of equals, greatest": (lambda x: torch.dist(x, x.detach(), INF), [1.0, 2.0]),
    "distance to itself": (lambda x: torch.dist(x, x), [1.0, 2.0]),
    "power of zero": (lambda x: x.abs() ** x.new_tensor(0.0), [0.0, 1.0, -2.0]),
    "power of zero by the exponent": (lambda x, y: x**y, [0.0, 0.0, 2.0, 0.0], [0.0, 2.0, 0.0, -1.0]),
    "a number to a power": (lambda x: torch.pow(0.0, x), [0.0, 2.0]),
    "largest so far, ties": (lambda x: x.cummax(0).values, [1.0, 3.0, 3.0, 0.0]),
    "smallest so far, ties": (lambda x: x.cummin(0).values, [1.0, 0.0, 0.0, 3.0]),
    "logit outside": (torch.logit, [-0.5, 0.0, 0.5, 1.0, 1.5]),
    "logit with eps": (lambda x: torch.logit(x, 0.1), [-0.5, 0.1, 0.5, 0.9, 1.5]),
    "angle at the origin": (torch.atan2, [0.0, 0.0, 1.0, 3.0], [0.0, 1.0, 0.0, -2.0]),
    "hypotenuse of nothing": (torch.hypot, [0.0, 3.0, INF], [0.0, -4.0, 1.0]),
    "logarithm of gamma at its poles": (torch.lgamma, [0.0, -0.0, -1.0, 2.0, INF]),
    "entropy of nothing": (torch.special.entr, [0.0, 1.0, 0.5, INF]),
    "quantile of nothing": (torch.special.ndtri, [0.0, 1.0, 0.5]),
    "logarithm of a tail": (torch.special.log_ndtr, [-150.0, -3.0, 0.0, 20.0]),
    "scaled error function far out": (torch.special.erfcx, [20.0, 1e4, 0.5, -3.0, INF, 1.9999, 2.0]),
    "bessel function left of zero": (lambda x: torch.special.modified_bessel_i1(x.detach()) + x, [-20.0, -7.0, 7.0, 20.0]),
    "smooth loss of infinities": (lambda x: F.smooth_l1_loss(x, torch.ones(5), reduction="sum"), [INF, -INF, NAN, 1.5, 9.0]),
    "huber loss of infinities": (lambda x: F.huber_loss(x, torch.ones(5), reduction="sum"), [INF, -INF, NAN, 1.5, 9.0]),
    "renormalized NaN": (lambda x: torch.renorm(x[None], 2, 0, 1.0), [1.0, NAN]),
    "distances with NaN": (lambda x: torch.cdist(x[None], torch.zeros(1, 2), p=1.0), [1.0, NAN]),
    "distances of pairs, none": (lambda x: F.pdist(x.view(3, 1), p=0.0) + x.sum(), [1.0, 1.0, NAN]),
    "extreme of ties, none of its own": (
        lambda x: torch.zeros(2).scatter_reduce(0, torch.tensor([0, 0, 1]), x, "amax", include_self=False),
        [0.0, 0.0, 1.0],
    ),
    "product with zeros and NaN": (
        lambda x, y: x.scatter_reduce(0, torch.tensor([0, 0, 1]), y, "prod"),
        [0.0, 2.0],
        [NAN, 0.0, 0.0],
    ),
    "softplus above its threshold": (lambda x: F.softplus(x, 3.0, 5.0), [1.6, 1.7, 2.0, 50.0, -50.0]),
    "softplus overflows": (F.softplus, [20.0, 20.5, 100.0, -200.0, INF]),
    "variance without freedom": (lambda x: x.var(0, correction=2), [1.0, 3.0]),
    "variance of less than that": (lambda x: x.var(0, correction=5), [1.0, 3.0]),
    "deviation without freedom": (lambda x: x.std(0, correction=2), [1.0, 3.0]),
    "deviation of equals": (lambda x: x.std() + x.sum(), [2.0, 2.0, 2.0]),
    "deviation and mean of equals": (lambda x: torch.stack(torch.std_mean(x)), [2.0, 2.0, 2.0]),
    "norm of zeros": (lambda x: torch.stack([x.norm(), x.norm(1), x.norm(3), x.norm(INF)]), [0.0, 0.0]),
    "norm with NaN": (lambda x: x.norm(), [1.0, NAN]),
    "normalized NaN": (lambda x: F.normalize(x, dim=0), [1.0, NAN]),
    "normalized zeros": (lambda x: F.normalize(x, dim=0), [0.0, 0.0]),
    "distance with NaN": (lambda x: F.pairwise_distance(x[None], torch.ones(1, 2)), [1.0, NAN]),
    "celu overflows": (lambda x: F.celu(x, 0.7), [88.0, 89.0, 1e4, INF, -INF]),
    "elu at NaN": (F.elu, [NAN] * 16),
    "selu overflows": (F.selu, [88.0, 89.0, 1e4, -1e4]),
    "silu of the largest": (F.silu, [LARGEST, 100.0, -100.0]),
    "mish of the largest": (F.mish, [LARGEST, 100.0, -100.0]),
    "gelu of large numbers": (F.gelu, [1e30, 1e20, -1e20, -1e30]),
    "log sigmoid far out": (F.logsigmoid, [200.0, -200.0, 0.0, INF, -INF]),
    "rectified NaN": (F.relu, [NAN, 0.0, -0.0, 1.0]),
    "magnitude of NaN": (torch.abs, [NAN, 0.0, -0.0, INF, -INF]),
    "angle of NaN": (torch.angle, [NAN, 0.0, -1.0]),
    "clamped NaN": (lambda x: x.clamp(-1, 1), [NAN, -1.0, 1.0, 2.0]),
    "clamped by NaN": (lambda x, y: x.clamp(max=y), [1.0, 2.0, NAN], [NAN, 1.0, 1.0]),
    "clamped by two": (lambda x, y, z: x.clamp(y, z), [1.0, 2.0, 3.0, 0.0], [1.0, NAN, 4.0, 1.0], [1.0, 3.0, 2.0, NAN]),
    "maximum with NaN": (torch.maximum, [NAN, 1.0, 1.0], [1.0, NAN, 1.0]),
    "fmax of equals": (torch.fmax, [1.0, NAN, 1.0, 2.0], [1.0, 1.0, NAN, 1.0]),
    "largest with NaN": (lambda x: x.max(), [1.0, NAN, 2.0, NAN]),
    "median with NaN": (lambda x: x.median(), [1.0, NAN, 2.0]),
    "sign of another": (torch.copysign, [0.0, -0.0, 1.0, NAN], [1.0, -1.0, -0.0, 1.0]),
    "bessel at zero": (torch.i0, [0.0, 1.0, -100.0]),
    "sinc near zero": (torch.sinc, [0.0, 1e-38, 1.0]),
    "one by a root of zero": (torch.rsqrt, [0.0, -0.0, INF, -1.0]),
    "log add exp of infinities": (torch.logaddexp, [INF, -INF, INF], [INF, -INF, -INF]),
    "log gamma of integers": (lambda x: torch.mvlgamma(x, 2), [1.0, 2.0, 3.0]),
    "product with zeros": (lambda x: x.prod(), [1.0, 0.0, 2.0]),
    "hinge of classes": (lambda x: F.multi_margin_loss(x[None], torch.tensor([1])), [1.0, 2.0, 0.5, NAN]),
    "hinge of labels": (lambda x: F.multilabel_margin_loss(x, torch.tensor([1, 0, -1, 2])), [1.0, 2.0, 3.0, NAN]),
    "soft hinge": (lambda x: F.multilabel_soft_margin_loss(x[None], torch.ones(1, 3)), [INF, -INF, 200.0]),
    "shrunk NaN": (F.softshrink, [NAN, 0.5, -0.5]),
    "gate of the largest": (lambda x: F.glu(x, 0), [1e38, 1.0, 100.0, -100.0]),
    "far from the mean": (lambda x: x.var(), [3e38, 3.1e38, 3.2e38, 3e38]),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("name", DERIVATIVES)
def test_values_and_derivatives_are_those_of_torch(name):
    f, *values = DERIVATIVES[name]
    agree(lambda *args: f(*args), lambda: tuple(map(tensor, values)), grad=True, pure=True)


# On `xla` too, where torch_xla's own XLA gives them: its maximum drops NaN.
FINITE = [
    "cross entropy of certainty",
    "distance of equals",
    "power of zero",
    "largest so far, ties",
    "softplus above its threshold",
    "deviation of equals",
    "norm of zeros",
    "product with zeros",
]


@pytest.mark.xla
@pytest.mark.parametrize("name", FINITE)
def test_derivatives_on_xla(name):
    f, *values = DERIVATIVES[name]
    torch_xla = pytest.importorskip("torch_xla")
    agree(lambda *args: f(*args), lambda: tuple(map(tensor, values)), device=torch_xla.device(), grad=True, pure=True)


GRIDS = {
    "border": [[-1.0, -1.0], [1.0, 1.0], [0.3, -2.0], [-0.2, 0.4]],
    "outside": [[-1.5, 1.1], [2.0, 0.0], [-1.2, -3.3], [0.1, 0.2]],
    "no point": [[NAN, 0.0], [0.0, NAN], [0.2, 0.1], [NAN, NAN]],
}


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_sampling_at_borders_and_outside(mode, padding, align_corners):
    def f(x, *grids):
        return [F.grid_sample(x, g[None, None], mode, padding, align_corners) for g in grids]

    def make_args():
        torch.manual_seed(0)
        grids = [g for name, g in GRIDS.items() if name != "no point" or (padding, mode) == ("zeros", "bilinear")]
        return (torch.randn(1, 2, 3, 4, requires_grad=True), *map(tensor, grids))

    agree(f, make_args, grad=True, pure=True, tol=1e-4)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_sampling_of_volumes(mode, padding):
    def make_args():
        torch.manual_seed(0)
        return torch.randn(1, 2, 3, 4, 2, requires_grad=True), (torch.rand(1, 2, 2, 2, 3) * 3 - 1.5).requires_grad_()

    agree(lambda x, g: F.grid_sample(x, g, mode, padding, align_corners=False), make_args, grad=True, pure=True, tol=1e-4)


POISON = {
    "means of windows": lambda x: (F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool1d(x[0], 3)),
    "largest of windows": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "largest of windows of almost equal size": lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True),
    "linear resizing": lambda x: F.interpolate(x, (7, 9), mode="bilinear"),
    "resizing by area": lambda x: F.interpolate(x, (3, 2), mode="area"),
    "smooth resizing": lambda x: F.interpolate(x, (3, 2), mode="bilinear", antialias=True),
    "smooth cubic resizing": lambda x: F.interpolate(x, (3, 2), mode="bicubic", antialias=True),
}


@pytest.mark.parametrize(
    ("name", "value"), [*((name, NAN) for name in POISON), ("means of windows", INF), ("linear resizing", INF)]
)
def test_one_element_reaches_no_further_than_in_eager(name, value):
    def make_args():
        torch.manual_seed(0)
        x = torch.randn(1, 2, 5, 5)
        x[0, 0, 2, 1] = value
        return (x,)

    agree(POISON[name], make_args, pure=True)


def test_indices_of_running_extremes_after_nan():
    x = [1.0, NAN, 2.0, NAN, 3.0]
    got = agree(lambda x: (x.cummax(0), x.cummin(0)), lambda: (tensor(x, grad=False),), pure=True)
    assert got.outputs[0].indices.tolist() == [0, 1, 1, 3, 3]


def test_median_names_the_nan():
    agree(
        lambda x: (x.median(0), x.nanmedian(0)), lambda: (tensor([[1.0, NAN], [NAN, 2.0], [0.0, NAN]], grad=False),), pure=True
    )


def test_variance_of_large_numbers_is_finite():
    got = agree(
        lambda x: (x.var(0), x.std(0)), lambda: (tensor([[1e38, 3e19], [1e38, 0.0], [1e38, 1.0]], grad=False),), pure=True
    )
    assert all(out.isfinite().all() for out in got.outputs)


@pytest.mark.filterwarnings("ignore:.*index_reduce.. is in beta")
@pytest.mark.parametrize("how", ["amin", "amax"])
def test_extremes_scattered_over_infinities(how):
    """What does not take part is the worst element; where that comes as a source, it is no NaN."""

    def f(x, source):
        index = torch.tensor([0, 0, 1])
        return x.scatter_reduce(0, index, source, how, include_self=False), x.index_reduce(
            0, index, source, how, include_self=False
        )

    agree(f, lambda: (tensor([0.0, 0.0, 1.0]), tensor([-INF, 1.0, INF])), grad=True, pure=True)
    agree(f, lambda: (tensor([0.0, 0.0, 1.0]), tensor([INF, INF, -INF])), grad=True, pure=True)
    agree(f, lambda: (tensor([0.0, INF, 1.0]), tensor([NAN, 1.0, -INF])), pure=True)


def test_gradients_of_embeddings_are_divided_by_how_often_a_row_is_read(device):
    ids = torch.tensor([[0, 2, 2], [2, 1, 0]])
    module = nn.Embedding(4, 3, padding_idx=1, scale_grad_by_freq=True)
    agree(module, lambda: (ids,), device=device, grad=True, pure=True)


def test_a_sparse_gradient_is_left_to_eager():
    module = nn.Embedding(4, 3, sparse=True)
    reference = copy.deepcopy(module)
    ids = torch.tensor([0, 2, 2])
    compiled(module)(ids).sum().backward()
    reference(ids).sum().backward()
    assert module.weight.grad.is_sparse
    torch.testing.assert_close(module.weight.grad.to_dense(), reference.weight.grad.to_dense())
    torch.optim.SparseAdam(module.parameters()).step()


def test_a_sparse_gradient_of_gather_and_bags_is_left_to_eager():
    bag = nn.EmbeddingBag(4, 3, mode="sum", sparse=True)
    compiled(bag)(torch.tensor([[0, 2]])).sum().backward()
    assert bag.weight.grad.is_sparse
    x = torch.ones(3, requires_grad=True)
    compiled(lambda x: torch.gather(x, 0, torch.tensor([1]), sparse_grad=True) * 2)(x).sum().backward()
    assert x.grad.is_sparse


def test_a_degree_that_is_infinite_ends():
    x, degree = torch.tensor([2.0, 0.5, 2.0]), torch.tensor([INF, -INF, 3.0])
    for polynomial in (torch.special.chebyshev_polynomial_t, torch.special.hermite_polynomial_h):
        torch.testing.assert_close(compiled(polynomial)(x, degree), polynomial(x, degree))


def test_limits_of_incomplete_gamma_functions():
    a, x = (torch.tensor(values) for values in ([INF, 0.0, 2.0, 2.0, INF, -1.0], [1.0, 1.0, INF, 0.0, INF, 1.0]))
    for function in (torch.special.gammainc, torch.special.gammaincc):
        torch.testing.assert_close(compiled(function)(a, x), function(a, x), equal_nan=True)


def test_a_search_ends_where_that_of_torch_does():
    rows, values = torch.tensor([1.0, 3.0, 2.0, 8.0, 5.0]), torch.tensor([NAN, 2.5, 8.0, 0.0, 9.0])
    for right in (False, True):
        agree(lambda r, v, right=right: torch.searchsorted(r, v, right=right), lambda: (rows, values))
        agree(lambda r, v, right=right: torch.bucketize(v, r, right=right), lambda: (rows, values))
