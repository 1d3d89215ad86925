"""`while_loop` and `fori_loop`: Newton's iteration until it holds, and a power of a matrix by a known number of steps.

python examples/while_loop.py
"""

from __future__ import annotations

import torch

from pure_backend import fori_loop, while_loop


def square_root(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`sqrt(x)` by Newton's iteration, and how many steps it took; one XLA loop."""

    def wrong(steps: torch.Tensor, guess: torch.Tensor) -> torch.Tensor:
        return ((guess * guess - x).abs() > 1e-6 * x) & (steps < 50)

    def better(steps: torch.Tensor, guess: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return steps + 1, (guess + x / guess) / 2

    steps, root = while_loop(wrong, better, (torch.tensor(0), x.clone()))
    return root, steps


def main() -> tuple[float, int, list[list[float]]]:
    """Run both and print.

    Returns:
        The root, the steps it took, and the gradient of the power's trace.
    """
    root, steps = square_root(torch.tensor(2.0))
    print(f"sqrt(2) = {root.item():.6f} after {steps.item()} steps")
    matrix = torch.tensor([[0.5, 0.25], [0.0, 0.5]], requires_grad=True)
    power = fori_loop(0, 5, lambda i, value: value @ matrix, torch.eye(2))
    power.trace().backward()
    print("matrix to the fifth:", power.tolist(), "gradient of its trace:", matrix.grad.tolist())
    return root.item(), int(steps.item()), matrix.grad.tolist()


if __name__ == "__main__":
    main()
