"""`torch.func` transforms inside a compiled function."""

import pytest
import torch
from oracle import agree, compiled


def under_no_grad(f, x):
    with torch.no_grad():
        return f(x)


TRANSFORMS = {
    "vmap": lambda x, w: torch.vmap(lambda row: (row * w).sum() + row)(x),
    "vmap of matmul": lambda x, w: torch.vmap(lambda row: torch.outer(row, w) @ w)(x),
    "nested vmap": lambda x, w: torch.vmap(torch.vmap(lambda a: a.sin() * 2))(x) * w,
    "out_dims": lambda x, w: torch.vmap(lambda row: row * w, out_dims=1)(x),
    "grad": lambda x, w: torch.func.grad(lambda a: (a * a * w).sum())(x),
    "vmap of grad": lambda x, w: torch.vmap(torch.func.grad(lambda row: (row.sin() * w).sum()))(x),
    "grad under no_grad": lambda x, w: under_no_grad(torch.func.grad(lambda a: (a * a * w).sum()), x),
    "in place inside": lambda x, w: torch.vmap(lambda row: (row * 1).add_(w).mul_(2))(x),
    "two regions": lambda x, w: torch.vmap(lambda r: r + w)(torch.vmap(lambda r: r * w)(x).sin()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, device):
    """Values and, through `vmap`, gradients."""

    def make_args():
        x = torch.linspace(-1, 1, 12).reshape(3, 4)
        return (x.requires_grad_("grad" not in name), torch.tensor([0.5, -1.0, 2.0, 0.25]))

    agree(TRANSFORMS[name], make_args, device=device, grad="grad" not in name)


def test_a_failure_inside_leaves_no_level_behind():
    def f(x):
        return torch.vmap(lambda row: row.view(7))(x)

    for _ in range(2):
        with pytest.raises(Exception):  # noqa: B017  (whatever Dynamo or eager raise)
            compiled(f)(torch.ones(3, 4))
    assert torch._C._functorch.maybe_current_level() is None
