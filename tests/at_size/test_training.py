"""Training at real sizes: after ten steps of AdamW losses and parameters are as near to f64 as eager's are."""

import pytest
import torch

from .models import MODELS, Make
from .training import STEPS, WAYS, eager, trained

pytestmark = [pytest.mark.filterwarnings(f"ignore:::{package}") for package in ("transformers", "torch", "torch_xla", "jax")]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_ten_steps_in_every_way(make: Make, device: torch.device) -> None:
    torch.manual_seed(0)
    model, make_batch = make()
    batches = [make_batch() for _ in range(STEPS)]
    exact = eager(model, batches, torch.float64)
    allowed = [4 * distance + 1e-6 for distance in eager(model, batches, torch.float32).distance(exact)]
    wrong = {}
    for way in WAYS:  # in one test, since the ways share programs
        distances = trained(way, model, batches, device).distance(exact)
        worst = max(d / a for d, a in zip(distances, allowed, strict=True))
        if worst > 1:
            wrong[way] = worst
    assert not wrong, f"further from f64 than eager in f32, by so many times: {wrong}"
