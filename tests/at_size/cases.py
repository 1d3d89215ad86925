"""Operators at real sizes, by family: functions of tensors, with what makes their inputs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

f32, f64, f16, bf16, c64 = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64


@dataclasses.dataclass(frozen=True)
class Case:
    """A function at a real size.

    Attributes:
        name: What it calls.
        function: Of tensors.
        shapes: Of its floating-point inputs.
        dtype: Of those.
        below: For each integer input, its shape and the number that its values stay below.
        grad: Whether its gradients are compared too.
        positive: Whether the inputs are between 0.5 and 1.5, not around 0.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = f32
    below: tuple[tuple[tuple[int, ...], int], ...] = ()
    grad: bool = True
    positive: bool = False

    def inputs(self) -> list[torch.Tensor]:
        """Random values, in the order of the function's arguments."""
        make = (lambda *s, **k: torch.rand(*s, **k) + 0.5) if self.positive else torch.randn
        floats = [make(shape, dtype=f32 if self.dtype in (f16, bf16) else self.dtype).to(self.dtype) for shape in self.shapes]
        return floats + [torch.randint(limit, shape) for shape, limit in self.below]


def _each(dtype: torch.dtype, *shapes: tuple[int, ...], **functions: Callable[..., Any]) -> list[Case]:
    return [Case(name, function, shapes, dtype) for name, function in functions.items()]


# Products ---------------------------------------------------------------------------------------------------

_LAYOUTS: dict[str, Callable[..., Any]] = {  # of f[256, 512], f[512, 384], f[384, 512]
    "mm": lambda a, b, c: torch.mm(a, b),
    "right_transposed": lambda a, b, c: a @ c.t(),
    "left_transposed": lambda a, b, c: c.t().mT @ (a.t().contiguous()),
    "both_transposed": lambda a, b, c: c.t().t() @ a.t(),
    "transposed_result": lambda a, b, c: (a @ b).t().contiguous(),
    "contracted_over_rows": lambda a, b, c: a.t() @ a + b @ c,
    "strided": lambda a, b, c: a[:, ::2] @ b[::2, 1:],
    "offset": lambda a, b, c: a[1:, 3:] @ b[3:],
    "addmm": lambda a, b, c: torch.addmm(b[0], a, b, beta=0.5, alpha=2),
    "linear": lambda a, b, c: F.linear(a, c, b[0]),
    "linear_of_three": lambda a, b, c: F.linear(a.view(2, 128, 512), c),
    "einsum": lambda a, b, c: torch.einsum("ik,kj,jk->ij", a, b, c),
    "mv": lambda a, b, c: torch.mv(a, b[:, 0]),
    "outer": lambda a, b, c: torch.outer(a[:, 0], c[0]),
    "tensordot": lambda a, b, c: torch.tensordot(a.view(2, 128, 512), c, ([2], [1])),
    "chain": lambda a, b, c: torch.linalg.multi_dot((a, b, c)),
}
_BATCHES: dict[str, Callable[..., Any]] = {  # of f[4, 128, 256], f[4, 256, 192], f[4, 192, 256]
    "bmm": lambda a, b, c: torch.bmm(a, b),
    "bmm_transposed": lambda a, b, c: a @ c.mT,
    "baddbmm": lambda a, b, c: torch.baddbmm(b[:, :1, :], a, b, beta=0.5),
    "batch_by_matrix": lambda a, b, c: a @ b[0],
    "matrix_by_batch": lambda a, b, c: a[0] @ b,
    "einsum_of_batches": lambda a, b, c: torch.einsum("bik,bjk->bij", a, c),
    "heads_apart": lambda a, b, c: a.view(4, 128, 4, 64).transpose(1, 2) @ a.view(4, 128, 4, 64).permute(0, 2, 3, 1),
    "broadcast": lambda a, b, c: a[:, None] @ b[:2],
}


def _together(functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    return lambda *args: tuple(function(*args) for function in functions.values())


def _products(dtype: torch.dtype) -> list[Case]:
    matrices, batches = ((256, 512), (512, 384), (384, 512)), ((4, 128, 256), (4, 256, 192), (4, 192, 256))
    if dtype == f32:  # each in a program of its own, where all its operands are inputs
        return _each(dtype, *matrices, **_LAYOUTS) + _each(dtype, *batches, **_BATCHES)
    every = [("matrices", _together(_LAYOUTS), matrices), ("batches", _together(_BATCHES), batches)]
    return [Case(name, function, shapes, dtype) for name, function, shapes in every]


# Convolutions -----------------------------------------------------------------------------------------------


def _convolutions() -> Iterator[Case]:
    pictures, kernel = (2, 64, 24, 24), (64, 64, 3, 3)
    yield Case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (pictures, kernel, (64,)))
    yield Case("pointwise", lambda x, w: F.conv2d(x, w), (pictures, (128, 64, 1, 1)))
    yield Case("stride_dilation", lambda x, w: F.conv2d(x, w, stride=2, padding=2, dilation=2), (pictures, kernel))
    yield Case("grouped", lambda x, w: F.conv2d(x, w, padding=1, groups=4), (pictures, (128, 16, 3, 3)))
    yield Case("depthwise", lambda x, w: F.conv2d(x, w, padding=2, groups=64), (pictures, (64, 1, 5, 5)))
    yield Case("channels_last", lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w), (pictures, kernel))
    yield Case("transposed", lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1), (pictures, kernel))
    yield Case("transposed_grouped", lambda x, w: F.conv_transpose2d(x, w, groups=4), (pictures, (64, 16, 3, 3)))
    yield Case("conv1d", lambda x, w: F.conv1d(x, w, padding=3), ((4, 128, 256), (128, 128, 7)))
    yield Case("transposed1d", lambda x, w: F.conv_transpose1d(x, w, stride=2), ((4, 64, 128), (64, 64, 4)))
    yield Case("conv3d", lambda x, w: F.conv3d(x, w, padding=1), ((2, 32, 8, 12, 12), (32, 32, 3, 3, 3)))
    yield Case("transposed3d", lambda x, w: F.conv_transpose3d(x, w, stride=2), ((1, 32, 6, 8, 8), (32, 16, 2, 2, 2)))
    yield Case("conv2d_bf16", lambda x, w: F.conv2d(x, w, padding=1), (pictures, kernel), bf16)


# Attention, norms, recurrences ------------------------------------------------------------------------------

_sdpa = F.scaled_dot_product_attention


def _attention() -> Iterator[Case]:
    qkv = ((2, 8, 128, 64),) * 3
    yield Case("plain", lambda q, k, v: _sdpa(q, k, v), qkv)
    yield Case("causal", lambda q, k, v: _sdpa(q, k, v, is_causal=True), qkv)
    yield Case("float_mask", lambda q, k, v, m: _sdpa(q, k, v, attn_mask=m), (*qkv, (2, 1, 128, 128)))
    yield Case("bool_mask", lambda q, k, v, m: _sdpa(q, k, v, attn_mask=m > 0), qkv, below=(((128, 128), 3),))
    yield Case("grouped", lambda q, k, v: _sdpa(q, k, v, enable_gqa=True), ((2, 8, 128, 64), *((2, 2, 128, 64),) * 2))
    yield Case("bf16", lambda q, k, v: _sdpa(q, k, v, is_causal=True), qkv, bf16)
    yield Case("written_out", lambda q, k, v: (q @ k.mT / 8).softmax(-1) @ v, qkv)


def _norms() -> Iterator[Case]:
    rows, pictures, channels = ((256, 512), (512,), (512,)), (4, 128, 16, 16), ((128,), (128,))
    yield Case("layer_norm", lambda x, w, b: F.layer_norm(x, (512,), w, b), rows)
    yield Case("rms_norm", lambda x, w: F.rms_norm(x, (512,), w), rows[:2])
    yield Case("group_norm", lambda x, w, b: F.group_norm(x, 8, w, b), (pictures, *channels))
    yield Case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (pictures, *channels))
    yield Case("batch_norm", _batch_norm, (pictures, *channels))
    yield Case("normalize", lambda x: F.normalize(x, dim=1), rows[:1])
    yield Case("softmax", lambda x: (x.softmax(1), x.log_softmax(0)), rows[:1])
    yield Case("local_response_norm", lambda x: F.local_response_norm(x, 5), (pictures,))


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, var = w.detach().clone(), b.detach().square()
    return F.batch_norm(x, mean, var, w, b, training=True), mean, var


def _recurrences() -> Iterator[Case]:
    def shapes(gates: int) -> tuple[tuple[int, ...], ...]:
        return (gates * 256, 256), (gates * 256, 256), (gates * 256,), (gates * 256,)

    def unrolled(cell: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            state, given = torch.zeros_like(x[0]), [weight / 16 for weight in weights]  # larger ones make it chaotic
            for step in x:
                state = cell(step, state, *given)
            return state

        return run

    def lstm(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        state, given = (torch.zeros_like(x[0]), torch.zeros_like(x[0])), [weight / 16 for weight in weights]
        for step in x:
            state = torch.lstm_cell(step, state, *given)
        return torch.stack(state)

    sequence = (4, 128, 256)
    yield Case("lstm_cell", lstm, (sequence, *shapes(4)))
    yield Case("gru_cell", unrolled(torch.gru_cell), (sequence, *shapes(3)))
    yield Case("rnn_cell", unrolled(torch.rnn_tanh_cell), (sequence, *shapes(1)))


# Reductions, scans, sorts, indices --------------------------------------------------------------------------

_ROWS = ((256, 1024),)


def _reductions() -> list[Case]:
    return _each(
        f32,
        *_ROWS,
        sums=lambda x: (x.sum(), x.sum(0), x.mean(1), x.nansum(1)),
        moments=lambda x: (x.var(1), x.std(0), torch.var_mean(x + 1, correction=0)),  # a mean near 0 is all cancellation
        extremes=lambda x: (x.amax(1), x.amin(0), x.max(1), x.min(0), x.argmax(1)),
        norms=lambda x: (x.norm(), x.norm(dim=1), torch.linalg.vector_norm(x, 1, dim=0), torch.logsumexp(x, 1)),
        products=lambda x: (x[:, :16].prod(1), (x > 0).any(1), (x > 4).all(0), torch.count_nonzero(x > 1, 0)),
        losses=lambda x: (F.cross_entropy(x, x.argmin(1)), F.smooth_l1_loss(x, x.roll(1).detach())),
    )


def _scans() -> list[Case]:
    each = _each(
        f32,
        *_ROWS,
        cumsum=lambda x: (x.cumsum(1), x.cumsum(0)),
        cummax=lambda x: x.cummax(1),
        cummin=lambda x: x.cummin(0),
        logcumsumexp=lambda x: x.logcumsumexp(1),
        diff=lambda x: torch.diff(x, dim=1),
        trapezoid=lambda x: torch.cumulative_trapezoid(x, dim=1),
    )
    return [*each, Case("cumprod", lambda x: x[:, :64].cumprod(1), _ROWS, positive=True)]


def _sorts() -> list[Case]:
    return _each(
        f64,  # without ties, whose order is nobody's promise
        *_ROWS,
        sort=lambda x: x.sort(1),
        sort_columns=lambda x: x.sort(0, descending=True),
        topk=lambda x: x.topk(40, 1),
        kthvalue=lambda x: x.kthvalue(100, 1),
        median=lambda x: x.median(1),
        quantile=lambda x: x[:, :200].quantile(0.3, 1),
        argsort=lambda x: x.argsort(1),
        searchsorted=lambda x: torch.searchsorted(x.detach().sort(1)[0], x.detach()),
    )


def _indices() -> Iterator[Case]:
    table, wide = ((512, 256),), (((512, 256), 512),)
    some = (((1000,), 512),)
    yield Case("embedding", lambda w, i: F.embedding(i, w), table, below=some)
    yield Case("embedding_bag", lambda w, i: F.embedding_bag(i.view(100, 10), w, mode="mean"), table, below=some)
    yield Case("index_select", lambda w, i: w.index_select(0, i), table, below=some)
    yield Case("index", lambda w, i: w[i, i % 256], table, below=some)
    yield Case("gather", lambda w, i: w.gather(0, i), table, below=wide)
    yield Case("take_along_dim", lambda w, i: torch.take_along_dim(w, i % 256, 1), table, below=wide)
    yield Case("index_add", lambda w, s, i: w.index_add(0, i, s), (*table, (1000, 256)), below=some)
    yield Case("index_put", lambda w, s, i: w.index_put((i,), s, accumulate=True), (*table, (1000, 256)), below=some)
    yield Case("scatter_add", lambda w, s, i: w.scatter_add(0, i, s), table * 2, below=wide)
    yield Case("scatter_reduce", lambda w, s, i: w.scatter_reduce(0, i, s, "amax"), table * 2, below=wide)
    yield Case("masked_fill", lambda w, i: w.masked_fill(i > 255, 0.0), table, below=wide)
    yield Case("where", lambda w, s, i: torch.where(i > 255, w, s), table * 2, below=wide)
    yield Case("write_rows", _written_rows, (*table, (100, 256)), below=(((100,), 5),))


def _written_rows(w: torch.Tensor, s: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    w = w * 2
    w[i + torch.arange(0, 500, 5, device=i.device)] = s
    return w


# Transforms and linear algebra ------------------------------------------------------------------------------


def _transforms() -> list[Case]:
    real = _each(
        f32,
        (128, 512),
        rfft=lambda x: torch.fft.rfft(x),
        rfft2=lambda x: torch.fft.rfft2(x),
        hfft=lambda x: torch.fft.ihfft(x),
        convolved=lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x[:1]), n=512),
    )
    both = _each(
        c64,
        (128, 512),
        fft=lambda x: torch.fft.fft(x),
        ifft2=lambda x: torch.fft.ifft2(x, norm="ortho"),
        shifted=lambda x: torch.fft.fftshift(torch.fft.fftn(x)),
    )
    return real + both


def _linear_algebra() -> list[Case]:
    def definite(x: torch.Tensor) -> torch.Tensor:
        return x @ x.mT / 64 + torch.eye(64, dtype=x.dtype, device=x.device)

    return _each(
        f64,
        (4, 64, 64),
        (4, 64, 16),
        solve=lambda a, b: torch.linalg.solve(definite(a), b),
        inv=lambda a, b: torch.linalg.inv(definite(a)),
        cholesky=lambda a, b: torch.linalg.cholesky(definite(a)),
        cholesky_solve=lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(definite(a))),
        triangular=lambda a, b: torch.linalg.solve_triangular(torch.linalg.cholesky(definite(a)), b, upper=False),
        slogdet=lambda a, b: torch.linalg.slogdet(definite(a))[1],
        eigvalsh=lambda a, b: torch.linalg.eigvalsh(definite(a)),
        svdvals=lambda a, b: torch.linalg.svdvals(b),
        qr=lambda a, b: torch.linalg.qr(b)[0].abs(),
        matrix_exp=lambda a, b: torch.linalg.matrix_exp(a / 16),
        pinv=lambda a, b: torch.linalg.pinv(b),
    )


FAMILIES: dict[str, list[Case]] = {
    "products_f32": _products(f32),
    "products_f64": _products(f64),
    "products_f16": _products(f16),
    "products_bf16": _products(bf16),
    "products_c64": _products(c64),
    "convolutions": [*_convolutions()],
    "attention": [*_attention()],
    "norms": [*_norms()],
    "recurrences": [*_recurrences()],
    "reductions": _reductions(),
    "scans": _scans(),
    "sorts": _sorts(),
    "indices": [*_indices()],
    "transforms": _transforms(),
    "linear_algebra": _linear_algebra(),
}
