"""`scan`: a cumulative sum, running means with a carry of two tensors, and the gradient of a recurrence.

python examples/scan_cumsum.py
"""

from __future__ import annotations

import torch

from pure_backend import scan


def running_mean(carry: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One step: the mean of all values so far."""
    carry = {"sum": carry["sum"] + x, "count": carry["count"] + 1}
    return carry, carry["sum"] / carry["count"]


def main() -> tuple[list[float], list[float], float]:
    """Run all and print.

    Returns:
        The sums, the means, and the gradient of the recurrence by its weight.
    """
    carry, sums = scan(lambda c, x: (c + x, c + x), torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
    print("cumulative sums:", sums.tolist(), "last carry:", carry.item())
    _, means = scan(running_mean, {"sum": torch.tensor(0.0), "count": torch.tensor(0)}, torch.arange(1.0, 6.0))
    print("running means:", means.tolist())
    weight = torch.tensor(0.5, requires_grad=True)
    last, _ = scan(lambda h, x: (h * weight + x, h), torch.tensor(0.0), torch.ones(4))
    last.backward()
    print("d(last) / d(weight):", weight.grad.item())
    return sums.tolist(), means.tolist(), weight.grad.item()


if __name__ == "__main__":
    main()
