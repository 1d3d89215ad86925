"""Plans of views against torch's own strides, on random chains of view calls."""

import math
import random
from collections import Counter

import pytest
import torch

from pure_backend.ir.geometry import Geometry
from pure_backend.ir.views import Gather, OutOfBase, Slices, access_of

SHAPES = [(1,), (24,), (2, 3, 4), (6, 4), (36,), (6, 6), (2, 3, 4, 5), (4, 1, 6), ()]


def read(access, base: torch.Tensor) -> torch.Tensor:
    """What a access's docstring says it means."""
    memory = base.permute(access.order)
    if isinstance(access, Gather):
        if math.prod(access.size) == 0:
            return base.new_empty(access.size)
        place = torch.full(access.size, access.offset)
        for dim, (n, stride) in enumerate(zip(access.size, access.stride, strict=True)):
            shape = [n if d == dim else 1 for d in range(len(access.size))]
            place = place + (torch.arange(n) * stride).reshape(shape)
        return memory.reshape(-1)[place]
    cut = memory.reshape(access.shape)[
        tuple(slice(a, b, c) for a, b, c in zip(access.start, access.limit, access.step, strict=True))
    ]
    return cut.reshape(access.picked).permute(access.out).reshape(access.keep).expand(access.size)


def random_view(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """One random view call that the tensor permits, or the tensor itself."""
    dim = rng.randrange(x.ndim) if x.ndim else 0
    n = x.shape[dim] if x.ndim else 0
    kind = rng.choice(["slice", "step", "select", "permute", "split", "merge", "unsqueeze", "diagonal", "expand"])
    if kind in ("slice", "step") and x.ndim:
        start = rng.randrange(n + 1)
        return x[(slice(None),) * dim + (slice(start, rng.randrange(start, n + 1), 2 if kind == "step" else 1),)]
    if kind == "select" and n:
        return x.select(dim, rng.randrange(n))
    if kind == "permute":
        return x.permute(rng.sample(range(x.ndim), x.ndim))
    if kind == "split" and n and n % 2 == 0:
        return x.unflatten(dim, (2, n // 2))
    if kind == "merge" and x.ndim > 1 and x.stride(-2) == x.stride(-1) * x.shape[-1]:
        return x.flatten(-2)
    if kind == "diagonal" and x.ndim > 1:
        return x.diagonal(rng.choice([0, 1]), 0, 1)
    if kind == "expand":
        return x.unsqueeze(0).expand(2, *x.shape)
    return x.unsqueeze(0) if kind == "unsqueeze" else x


def random_base(rng: random.Random) -> torch.Tensor:
    shape = rng.choice(SHAPES)
    base = torch.arange(float(math.prod(shape))).reshape(shape)
    if rng.random() < 0.4:
        base = base.permute(rng.sample(range(base.ndim), base.ndim))
    if base.ndim and rng.random() < 0.2:
        base = base[..., ::2]
    return base


@pytest.mark.parametrize("seed", range(5))
def test_plans_agree_with_strides(seed):
    rng, kinds = random.Random(seed), Counter()
    for _ in range(800):
        base = random_base(rng)
        view = base
        for _ in range(rng.randrange(5)):
            view = random_view(view, rng)
        access = access_of(Geometry.of(base), Geometry.of(view))
        kinds[type(access)] += 1
        torch.testing.assert_close(read(access, base), view, rtol=0, atol=0)
    assert kinds[Slices] > 3 * kinds[Gather] > 0


@pytest.mark.parametrize("view", [lambda x: x[1:].as_strided((6, 6), (6, 1), 0), lambda x: x[:, ::2].as_strided((2,), (1,), 0)])
def test_views_outside_of_their_base(view):
    x = torch.arange(36.0).reshape(6, 6)
    base = x[1:] if view(x).numel() == 36 else x[:, ::2]
    with pytest.raises(OutOfBase):
        access_of(Geometry.of(base), Geometry.of(view(x)))


def test_usual_views_are_slices():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for view in (x, x[0], x[:, 1:], x.transpose(0, 2), x.view(6, 4), x.view(-1)[5:9], x[:, None].expand(2, 5, 3, 4)):
        assert isinstance(access_of(Geometry.of(x), Geometry.of(view)), Slices)
    assert isinstance(access_of(Geometry.of(x), Geometry.of(x.view(-1).unfold(0, 5, 3))), Gather)
