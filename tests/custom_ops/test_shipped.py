"""All shipped kernels: torch's own check of operators."""

import pytest
import torch

from pure_backend.custom_ops import kernels

CALLS = {
    "rms_norm": lambda: (torch.randn(2, 8, 128, requires_grad=True), torch.randn(128, requires_grad=True)),
    "flash_attention": lambda: tuple(torch.randn(1, heads, 16, 64, requires_grad=True) for heads in (4, 2, 2)),
    "quantized_matmul": lambda: (
        torch.randn(4, 128, requires_grad=True),
        torch.randint(-127, 127, (128, 128), dtype=torch.int8),
        torch.rand(128),
    ),
    "kv_cache_update_": lambda: (torch.zeros(1, 2, 16, 64), torch.ones(1, 2, 1, 64), torch.tensor(3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    torch.manual_seed(0)
    results = torch.library.opcheck(getattr(kernels, name)._opoverload, CALLS[name]())
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}
