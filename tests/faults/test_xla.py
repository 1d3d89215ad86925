"""What only `xla` tensors have: donated buffers, torch_xla's own client, its default device."""

import pytest
import torch

import pure_backend

torch_xla = pytest.importorskip("torch_xla", reason="about xla tensors")
pytestmark = pytest.mark.xla


def compiled(f, **keywords):
    """`f` in one graph of the backend under test."""
    return torch.compile(f, backend="assume_pure", fullgraph=True, **keywords)


def on_device(*shape: int) -> torch.Tensor:
    """Zeros that lie on the device, and do not wait to be made there."""
    x = torch.zeros(*shape, device=torch_xla.device())
    torch_xla.sync(wait=True)
    return x


def _add(x):
    torch.ops.xla.dynamo_set_buffer_donor_(x, True)
    x += 1


def _put_row(x):
    torch.ops.xla.dynamo_set_buffer_donor_(x, True)
    x[1:3].add_(1)
    return x.sum()


def _returned(x):
    torch.ops.xla.dynamo_set_buffer_donor_(x, True)
    x.mul_(2).add_(1)
    return x


@pytest.mark.parametrize("f", [_add, _put_row, _returned])
def test_a_donated_buffer_that_is_written_is_valid_again(f):
    """torch_xla's pattern for a cache: every step donates it and writes it."""
    step, x, want = compiled(f), on_device(4, 8), torch.zeros(4, 8)
    for _ in range(3):
        step(x)
        torch_xla.sync()
        want = {_add: want + 1, _returned: want * 2 + 1}.get(f, torch.cat([want[:1], want[1:3] + 1, want[3:]]))
    assert torch.equal(x.cpu(), want)
    assert pure_backend.statistics().traces == 1


def test_a_cache_of_a_module():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(8, 4))

        def forward(self, row):
            torch.ops.xla.dynamo_set_buffer_donor_(self.cache, True)
            self.cache[2] += row
            return self.cache.sum()

    module, row = Counter().to(torch_xla.device()), torch.ones(4, device=torch_xla.device())
    step = compiled(module)
    totals = []
    for _ in range(3):
        totals.append(step(row).item())
    assert totals == [4, 8, 12]


def test_a_donated_tensor_is_named_as_the_user_names_it():
    def f(scale, cache):
        torch.ops.xla.dynamo_set_buffer_donor_(cache, True)
        return cache * scale

    call, cache, scale = compiled(f), on_device(4, 8), torch.ones((), device=torch_xla.device())
    call(scale, cache)
    with pytest.raises(pure_backend.DonationError, match=r"argument 'cache', a tensor of shape \(4, 8\), was donated"):
        call(scale, cache)
