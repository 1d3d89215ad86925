"""Operators with odd arguments: in the program where that is natural, else left to eager for a reason."""

import pytest
import torch
import torch.nn.functional as F
from oracle import agree, both_raise
from torch import nn

ONE_PROGRAM = {"options": {"on_impure": "error"}}
t = torch.tensor
BOOLS = (t([True, False, False]), t([0, 1, 1]), t([False, True, False]))


def written_through_expanded(x):
    y = x.expand(2, 3)
    y[0, 0] = 5
    return y * 1


LOWERED = {
    "scatter_add of bools": (lambda x, i, s: x.scatter_add(0, i, s), BOOLS),
    "index_add of bools": (lambda x, i, s: x.index_add(0, i, s), BOOLS),
    **{
        f"scatter_reduce {how} of bools": (lambda x, i, s, how=how: x.scatter_reduce(0, i, s, how), BOOLS)
        for how in ("amax", "amin", "sum", "prod")
    },
    "sign of bools": (torch.sign, (t([True, False]),)),
    "sgn of bools": (torch.sgn, (t([True, False]),)),
    "elu with scales": (lambda x: torch.ops.aten.elu(x, 2, 3, 4), (torch.linspace(-1, 1, 5),)),
    "elu": (lambda x: F.elu(x, 0.5) + torch.ops.aten.elu(x, 2, 3), (torch.linspace(-1, 1, 5),)),
    "unfold_copy of nothing": (lambda x: torch.unfold_copy(x, 1, 0, 7), (torch.zeros(1, 0),)),
    "unfold of nothing": (lambda x: x.unfold(0, 0, 2) + 1, (torch.zeros(3),)),
    "addmv of nothing": (torch.addmv, (torch.ones(1), torch.zeros(0, 0), torch.zeros(0))),
    "addmm of nothing": (lambda b, x, y: torch.addmm(b, x, y, beta=2), (torch.ones(3), torch.zeros(2, 0), torch.zeros(0, 3))),
    "adaptive_avg_pool2d to nothing": (lambda x: F.adaptive_avg_pool2d(x, 0), (torch.ones(1, 2, 4, 4),)),
    "adaptive_avg_pool2d to rows of nothing": (lambda x: F.adaptive_avg_pool2d(x, (2, 0)), (torch.ones(1, 2, 4, 4),)),
    "repeat_interleave": (lambda x, r: x.repeat_interleave(r, output_size=5), (torch.arange(3.0), t([2, 0, 3]))),
    "tensordot with one element": (
        lambda x, y: torch.tensordot(x, y, dims=[[0, 1], [2, 0]]),
        (torch.ones(1, 1, 2), torch.arange(4.0).reshape(2, 1, 2)),
    ),
    **{
        f"{name}, {where}": (
            (lambda x, f=f: f(x, 3)) if where == "n" else (lambda x, f=f: f(0.5, x.round().abs())),
            (torch.linspace(-1, 4, 5),),
        )
        for name in ("chebyshev_polynomial_t", "chebyshev_polynomial_u", "laguerre_polynomial_l", "hermite_polynomial_h")
        for f in [getattr(torch.special, name)]
        for where in ("n", "x")
    },
}


@pytest.mark.parametrize("name", LOWERED)
def test_in_the_program(name):
    f, args = LOWERED[name]
    agree(f, lambda: tuple(a.clone() for a in args), tol=1e-4, **ONE_PROGRAM)


IDS, WEIGHT = t([[0, 1], [2, 1]]), torch.linspace(-2, 2, 12).reshape(4, 3)
LEFT = {
    "embedding_bag with max_norm": (lambda i, w: F.embedding_bag(i, w.detach(), max_norm=1.0), (IDS, WEIGHT)),
    "embedding_bag by frequency": (lambda i, w: F.embedding_bag(i, w, scale_grad_by_freq=True), (IDS, WEIGHT)),
    "_embedding_bag": (
        lambda i, w: torch.ops.aten._embedding_bag(w, i.reshape(-1), torch.arange(0, 4, 2))[0],
        (IDS, WEIGHT),
    ),
    "hann_window": (lambda x: x * torch.hann_window(5) + torch.hann_window(5, periodic=False), (torch.ones(5),)),
    "a write through expanded memory": (written_through_expanded, (torch.zeros(3),)),
}


@pytest.mark.usefixtures("as_users_see_it")
@pytest.mark.parametrize("name", LEFT)
def test_left_to_eager(name):
    f, args = LEFT[name]
    agree(f, lambda: tuple(a.clone() for a in args))


def test_overlapping_memory_is_eagers_error():
    def f(x):
        y = x.expand(2, 3)
        y += 1
        return y

    both_raise(f, lambda: (torch.zeros(3),))


def test_gradients_of_bags(caplog):
    agree(LEFT["embedding_bag by frequency"][0], lambda: (IDS, WEIGHT.clone().requires_grad_()), grad=True)
    assert "EmbeddingBag" in caplog.text


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_attention_in_evaluation(need_weights, grad):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def f(x):
        with torch.set_grad_enabled(grad):
            return attention(x, x, x, need_weights=need_weights)

    agree(f, lambda: (torch.linspace(-1, 1, 48).reshape(2, 3, 8),), **ONE_PROGRAM)


def test_a_loss_of_one_row_has_eagers_shape():
    """Torch's fake tensors give it another one."""
    target = torch.tensor([1, 0, -1, 2])
    agree(lambda x: F.multilabel_margin_loss(x * 2, target, reduction="none") + 1, lambda: (torch.arange(4.0) / 3,))
